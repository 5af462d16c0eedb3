"""Whom a peer follows into a group, and whom it avoids."""

import asyncio
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import ValueWithExpiration

from tests.training.swarm.averaging.test_averagers import resting
from training.swarm.averaging import matchmaking
from training.swarm.averaging.gradient_averager import SwarmGradientAverager
from training.swarm.averaging.matchmaking import (
    AWAY_AFTER,
    LOOKUP_INTERVAL_S,
    MAX_BACKOFF_S,
    MIN_BACKOFF_S,
    HostFirstKeys,
    HostFirstLeaders,
    UnreliablePeers,
)
from training.swarm.network.owner_keys import owner_peer

HELPER, STRANGER = (RSASignatureValidator(RSAPrivateKey()).local_public_key for _ in "ab")


class FakeDHT:
    """Answers at once with these entries, and records what is stored."""

    peer_id = PeerID(b"me" * 17)

    def __init__(self, **entries):
        self.entries, self.private_key, self.gate = entries, RSAPrivateKey(), None
        self.asked_s, self.stored = [], []

    async def answer(self):
        self.asked_s.append(time.monotonic())
        return ValueWithExpiration(self.entries.get("value"), get_dht_time() + 60) if self.entries else None

    def get(self, _key, **_options):
        return self.answer()

    async def store(self, **record):
        self.stored.append(record)
        return True


def looking(*owners, value=True):
    return {owner: ValueWithExpiration(value, 1000.0) for owner in owners}


def found_by(keys, only_active=True):
    return [peer for peer, _ in asyncio.run(keys.get_averagers(keys.current_key, only_active=only_active))]


def test_the_others_are_looked_for_a_few_times_a_second_however_fast_the_answer():
    dht = FakeDHT()
    keys = HostFirstKeys(dht, "run", "", None)

    async def look() -> None:
        for _ in range(4):
            assert await keys.get_averagers(keys.current_key, only_active=True) == []

    asyncio.run(look())
    waits = [later - earlier for earlier, later in pairwise(dht.asked_s)]
    assert len(waits) == 3
    assert min(waits) >= 0.95 * LOOKUP_INTERVAL_S


def test_an_averager_looks_for_groups_in_this_way():
    averager = resting(SwarmGradientAverager, [torch.nn.Parameter(torch.zeros(5))])
    averager._matchmaking = SimpleNamespace(
        group_key_manager=GroupKeyManager(FakeDHT(), "run", "01", 2),
        peer_id=FakeDHT.peer_id,
        min_matchmaking_time=1.0,
        target_group_size=2,
    )
    keys = averager._matchmaking.group_key_manager
    assert isinstance(keys, HostFirstKeys)
    assert (keys.prefix, keys.group_bits, keys.target_group_size) == ("run", "01", 2)
    assert isinstance(averager._matchmaking.potential_leaders, HostFirstLeaders)


def test_a_peer_declares_itself_under_its_own_key_alone():
    dht = FakeDHT()
    keys = HostFirstKeys(dht, "run", "", None)
    asyncio.run(keys.declare_averager("run.0b", dht.peer_id, 50.0))
    asyncio.run(keys.declare_averager("run.0b", dht.peer_id, 50.0, looking_for_group=False))
    looks, leaves = dht.stored
    assert looks["subkey"] == leaves["subkey"] == RSASignatureValidator(dht.private_key).local_public_key
    assert (looks["value"], leaves["value"]) == (True, False)
    assert 50.0 < leaves["expiration_time"] < 50.01


def test_nobody_is_found_under_a_key_that_is_not_an_owners():
    entries = {**looking(STRANGER), b"\x12\x20" + bytes(32): ValueWithExpiration(True, 1000.0), b"x": True, "y": 3}
    assert found_by(HostFirstKeys(FakeDHT(value=entries), "run", "", None)) == [owner_peer(STRANGER)]


def test_who_no_longer_looks_for_a_group_is_not_found():
    keys = HostFirstKeys(FakeDHT(value=looking(STRANGER, value=False)), "run", "", None)
    assert found_by(keys) == []
    assert found_by(keys, only_active=False) == [owner_peer(STRANGER)]


def test_while_the_hosts_peers_are_there_nobody_follows_anybody_else():
    dht = FakeDHT(value=looking(STRANGER, HELPER))
    keys = HostFirstKeys(dht, "run", "", None, host={owner_peer(HELPER)})
    assert not keys.begin_search()
    assert found_by(keys) == [owner_peer(HELPER)]
    dht.entries["value"] = looking(STRANGER)
    assert found_by(keys) == []


def test_once_the_hosts_peers_are_away_the_others_lead_until_they_are_back():
    dht = FakeDHT(value=looking(STRANGER))
    keys = HostFirstKeys(dht, "run", "", None, host={owner_peer(HELPER)})
    for _ in range(AWAY_AFTER):
        assert not keys.begin_search()
        assert found_by(keys) == []
    assert keys.begin_search()
    assert found_by(keys) == [owner_peer(STRANGER)]
    dht.entries["value"] = looking(STRANGER, HELPER)
    assert found_by(keys) == [owner_peer(HELPER)]
    assert not keys.begin_search()


def test_the_hosts_own_peers_always_lead():
    keys = HostFirstKeys(FakeDHT(), "run", "", None, host={FakeDHT.peer_id})
    assert all(keys.begin_search() for _ in range(5))


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(matchmaking, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_who_lets_groups_down_is_left_out_for_longer_and_longer(clock):
    unreliable, backoffs = UnreliablePeers(), []
    for _ in range(9):
        unreliable.update([], ["ghost"])
        began = clock.now
        while unreliable.is_avoided("ghost"):
            clock.now += MIN_BACKOFF_S / 10
        backoffs.append(round(clock.now - began))
    assert backoffs == [min(MIN_BACKOFF_S * 2**number, MAX_BACKOFF_S) for number in range(9)]


def test_a_whole_round_makes_up_for_one_that_was_missed(clock):
    unreliable = UnreliablePeers()
    unreliable.update(["other"], ["peer"])
    assert unreliable.is_avoided("peer")
    assert not unreliable.is_avoided("other")
    clock.now += MIN_BACKOFF_S
    unreliable.update(["peer", "other"], [])
    unreliable.update([], ["peer"])
    clock.now += MIN_BACKOFF_S
    assert not unreliable.is_avoided("peer")


def test_made_up_peers_fill_no_memory(clock):
    unreliable = UnreliablePeers()
    unreliable.update([], range(3 * matchmaking.MAX_REMEMBERED))
    assert len(unreliable.backoffs) == matchmaking.MAX_REMEMBERED
