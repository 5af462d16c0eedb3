"""How peers find a group: who says that it looks for one, whom the others follow, and whom they leave out."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from hivemind.averaging.control import StepControl
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import PotentialLeaders
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration

from training.swarm.host_peers import owner_peer
from training.swarm.observe.peer_metrics import owner_key

LOOKUP_INTERVAL_S = 0.2
AWAY_AFTER = 2
"""Searches in a row without a sign of the host's peers, after which the others lead groups themselves."""
FIRST_BREAK_S, LONGEST_BREAK_S = 30.0, 3600.0
"""How long a peer that let its group down is left out; doubled each time."""
MAX_REMEMBERED = 1024


class HostFirstKeys(GroupKeyManager):
    """Declares this peer under its identity's key, and finds the host's peers alone while there are any.

    Asks the DHT at most once per LOOKUP_INTERVAL_S: hivemind asks again as soon as it is answered, which costs each
    peer a whole core on a fast network.

    Args:
        host: the peers that lead; empty if anybody may.
        absentees: of the others, who is not followed.
    """

    last_lookup_s = -math.inf

    def __init__(self, *arguments: Any, host: Collection[PeerID] = (), absentees: "Absentees | None" = None):
        super().__init__(*arguments)
        self.host, self.absentees = host, absentees or Absentees()
        self.saw_host, self.searches_without_host = True, 0

    @property
    def anybody_leads(self) -> bool:
        """Whether the host names nobody, or its peers are away."""
        return not self.host or self.searches_without_host >= AWAY_AFTER

    def begin_search(self) -> bool:
        """Whether this peer may lead in the search that begins."""
        self.searches_without_host = 0 if self.saw_host else self.searches_without_host + 1
        self.saw_host = False
        return self.anybody_leads or self.peer_id in self.host

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """As hivemind's, under a subkey that only this peer can write."""
        expiration_time = expiration_time if looking_for_group else float(np.nextafter(expiration_time, math.inf))
        stored: bool = await self.dht.store(
            key=group_key,
            subkey=owner_key(self.dht),
            value=looking_for_group,
            expiration_time=expiration_time,
            return_future=True,
        )
        return stored

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        await asyncio.sleep(max(0.0, self.last_lookup_s + LOOKUP_INTERVAL_S - time.monotonic()))
        self.last_lookup_s = time.monotonic()
        result = await self.dht.get(group_key, latest=True, return_future=True)
        entries = result.value if result is not None and isinstance(result.value, dict) else {}
        found = [
            (peer, entry.expiration_time)
            for owner, entry in entries.items()
            if (peer := owner_peer(owner)) is not None and isinstance(entry, ValueWithExpiration)
            if (entry.value is True or not only_active) and not self.absentees.is_left_out(peer)
        ]
        of_host = [(peer, expiration) for peer, expiration in found if peer in self.host]
        self.saw_host |= bool(of_host)
        return of_host if of_host or not self.anybody_leads else found


class HostFirstLeaders(PotentialLeaders):
    """Peers that may not lead do not declare that they look for followers."""

    @asynccontextmanager
    async def begin_search(
        self, step: StepControl, key_manager: HostFirstKeys, declare: bool = True
    ) -> AsyncIterator[PotentialLeaders]:
        may_lead = key_manager.begin_search()
        async with super().begin_search(step, key_manager, declare=declare and may_lead):
            yield self


class Absentees:
    """Peers that joined a group and let it down, and how long they are left out of the next ones.

    A round that a peer takes part in to the end makes up for it.
    """

    def __init__(self) -> None:
        self.by_peer: dict[PeerID, tuple[float, float]] = {}
        """Until when each is left out, and for how long."""
        self.by_others: tuple[Collection[str], float] = ((), 0.0)
        """Whom enough others complain about, and until when that holds."""

    def is_left_out(self, peer: PeerID) -> bool:
        names, until_s = self.by_others
        return self.must_wait(peer) or (str(peer) in names and time.monotonic() < until_s)

    def leave_out(self, names: Collection[str], until_s: float) -> None:
        """Leave out these alone, besides this peer's own, until then: peer ids, and the time of the monotonic clock."""
        self.by_others = (names, until_s)

    def must_wait(self, peer: PeerID) -> bool:
        """Whether it has let down this peer's own groups."""
        return peer in self.by_peer and time.monotonic() < self.by_peer[peer][0]

    def waiting(self) -> list[PeerID]:
        """All of those, the latest first."""
        return [peer for peer in reversed(self.by_peer) if self.must_wait(peer)]

    def note(self, present: Collection[PeerID], absent: Collection[PeerID]) -> None:
        """What became of the members of a round."""
        for peer in present:
            self.by_peer.pop(peer, None)
        for peer in absent:
            _, before_s = self.by_peer.pop(peer, (0.0, FIRST_BREAK_S / 2))
            break_s = min(2 * before_s, LONGEST_BREAK_S)
            self.by_peer[peer] = (time.monotonic() + break_s, break_s)
        for peer in list(self.by_peer)[:-MAX_REMEMBERED]:
            del self.by_peer[peer]
