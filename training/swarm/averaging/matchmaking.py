"""How peers look for each other before an all-reduce."""

import asyncio
import math
import time

from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID

LOOK_INTERVAL_S = 0.2


class PatientKeyManager(GroupKeyManager):
    """Asks the DHT who is looking for a group, at most once in LOOK_INTERVAL_S.

    While hivemind's finds nobody it asks again as soon as it is answered: on a fast network a whole core of each peer
    goes into that.
    """

    asked_s = -math.inf

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        await asyncio.sleep(max(0.0, self.asked_s + LOOK_INTERVAL_S - time.monotonic()))
        self.asked_s = time.monotonic()
        found: list[tuple[PeerID, float]] = await super().get_averagers(group_key, only_active)
        return found


def with_patience(matchmaking: Matchmaking) -> Matchmaking:
    """The same, asking less often."""
    keys = matchmaking.group_key_manager
    matchmaking.group_key_manager = PatientKeyManager(keys.dht, keys.prefix, keys.group_bits, keys.target_group_size)
    return matchmaking
