"""Matchmaking: which peers declare themselves as leaders, whom the others follow, and whom they avoid."""

import asyncio
import math
import time
from collections.abc import Collection
from typing import Any

import numpy as np
from hivemind.averaging.control import StepControl
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import PotentialLeaders
from hivemind.p2p import PeerID

from training.swarm.network.owner_keys import owner_key, records_by_owner

LOOKUP_INTERVAL_S = 0.2
AWAY_AFTER = 2  # searches in a row that found none of the host's peers, after which other peers may lead
MIN_BACKOFF_S, MAX_BACKOFF_S = 30.0, 3600.0  # how long a peer that failed its group is avoided; doubled each time
MAX_REMEMBERED = 1024


class HostFirstKeys(GroupKeyManager):
    """Declares this peer under its identity's key, and finds only the host's peers while any of them looks for a group.

    Queries the DHT at most once per LOOKUP_INTERVAL_S: hivemind queries without a pause, which takes a whole core on a
    fast network.

    Args:
        host: the peers that lead; empty if anybody may.
        unreliable: peers that are not followed.
    """

    last_lookup_s = -math.inf

    def __init__(self, *arguments: Any, host: Collection[PeerID] = (), unreliable: "UnreliablePeers | None" = None):
        super().__init__(*arguments)
        self.host, self.unreliable = host, unreliable or UnreliablePeers()
        self.saw_host, self.searches_without_host = True, 0

    @property
    def anybody_leads(self) -> bool:
        """Whether the host names no leaders, or all of them are offline."""
        return not self.host or self.searches_without_host >= AWAY_AFTER

    def begin_search(self) -> bool:
        """Start a search; returns whether this peer may lead in it."""
        self.searches_without_host = 0 if self.saw_host else self.searches_without_host + 1
        self.saw_host = False
        return self.anybody_leads or self.peer_id in self.host

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        """As in hivemind, but under a subkey that only this peer can write."""
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
        declared = records_by_owner(await self.dht.get(group_key, latest=True, return_future=True))
        found = [
            (peer, entry.expiration_time)
            for peer, entry in declared.items()
            if (entry.value is True or not only_active) and not self.unreliable.is_avoided(peer)
        ]
        of_host = [(peer, expiration) for peer, expiration in found if peer in self.host]
        self.saw_host |= bool(of_host)
        return of_host if of_host or not self.anybody_leads else found


class HostFirstLeaders(PotentialLeaders):
    """Keeps peers that may not lead from declaring themselves as leaders."""

    def begin_search(self, step: StepControl, key_manager: HostFirstKeys, declare: bool = True) -> Any:
        may_lead = key_manager.begin_search()
        return super().begin_search(step, key_manager, declare=declare and may_lead)


class UnreliablePeers:
    """Peers that joined a group and failed it, and how long they are avoided; a completed round clears a peer, except
    one that is proven to have lied."""

    def __init__(self) -> None:
        self.backoffs: dict[PeerID, tuple[float, float]] = {}
        """When each one's backoff ends, and its length, in seconds."""
        self.reported: tuple[Collection[str], float] = ((), 0.0)
        """Peer ids that enough others complain about, and until when on the monotonic clock they are avoided."""
        self.proven: set[PeerID] = set()
        """Peers that signed two averages of one part, for a day or until the host bans them."""

    def is_avoided(self, peer: PeerID) -> bool:
        names, until_s = self.reported
        return peer in self.proven or self.is_in_backoff(peer) or (str(peer) in names and time.monotonic() < until_s)

    def is_in_backoff(self, peer: PeerID) -> bool:
        """Whether it has recently failed a group of this peer."""
        return peer in self.backoffs and time.monotonic() < self.backoffs[peer][0]

    def in_backoff(self) -> list[PeerID]:
        """All peers in backoff, the latest first."""
        return [peer for peer in reversed(self.backoffs) if self.is_in_backoff(peer)]

    def update(self, present: Collection[PeerID], failed: Collection[PeerID]) -> None:
        """Record the outcome of a round."""
        for peer in present:
            self.backoffs.pop(peer, None)
        for peer in failed:
            _, before_s = self.backoffs.pop(peer, (0.0, MIN_BACKOFF_S / 2))
            backoff_s = min(2 * before_s, MAX_BACKOFF_S)
            self.backoffs[peer] = (time.monotonic() + backoff_s, backoff_s)
        for peer in list(self.backoffs)[:-MAX_REMEMBERED]:
            del self.backoffs[peer]
