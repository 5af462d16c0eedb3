"""Nodes that were disconnected for a while."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tests.training.swarm.harness import wait_for
from training.swarm.network import reconnect
from training.swarm.network.dht import open_dht

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


async def forget_all(_dht, node):
    """Forget all peers, as after unanswered requests."""
    for number in list(node.protocol.routing_table.uid_to_peer_id):
        del node.protocol.routing_table[number]


async def known(_dht, node):
    return len(node.protocol.routing_table.uid_to_peer_id)


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(reconnect, "PING_INTERVAL_S", 0.5)
    opened = [open_dht([], client_mode=False, listen=LOOPBACK)]
    addresses = [str(address) for address in opened[0].get_visible_maddrs()]
    opened += [open_dht(addresses, client_mode=False, listen=LOOPBACK) for _ in range(2)]
    yield opened
    for dht in opened:
        dht.shutdown()


@pytest.mark.swarm
def test_nodes_that_have_forgotten_each_other_meet_again(nodes):
    wait_for(lambda: all(dht.run_coroutine(known) == 2 for dht in nodes), 20, "a first meeting")
    for dht in nodes:
        dht.run_coroutine(forget_all)
    wait_for(lambda: all(dht.run_coroutine(known) == 2 for dht in nodes), 20, "meeting again")
    nodes[1].store("key", "value", expiration_time=get_dht_time() + 60)
    assert nodes[2].get("key", latest=True).value == "value"


def test_answers_that_break_the_parser_end_no_calls(monkeypatch):
    monkeypatch.setattr(reconnect, "PING_INTERVAL_S", 0.0)
    helpers, calls = {PeerID(bytes([number]) * 32) for number in range(2 * reconnect.MAX_PINGS)}, []

    async def call_ping(peer):
        calls.append(peer)
        raise AssertionError("an id that is too long")

    protocol = SimpleNamespace(routing_table=SimpleNamespace(uid_to_peer_id={}), call_ping=call_ping)
    calling = reconnect.ping_lost_peers(SimpleNamespace(protocol=protocol, peer_id=None), helpers)
    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(calling, 0.5))
    assert set(calls[: len(helpers)]) == set(calls[len(helpers) : 2 * len(helpers)]) == helpers


def test_a_node_looks_around_more_than_once_after_an_answer(monkeypatch):
    monkeypatch.setattr(reconnect, "PING_INTERVAL_S", 0.0)
    helper, table, looks = PeerID(b"h" * 32), {}, []

    async def call_ping(peer):
        number = DHTID.generate()
        table[number] = peer
        return number

    async def find_nearest_nodes(_ids):
        looks.append(1)

    node = SimpleNamespace(
        protocol=SimpleNamespace(routing_table=SimpleNamespace(uid_to_peer_id=table), call_ping=call_ping),
        find_nearest_nodes=find_nearest_nodes,
        blacklist=SimpleNamespace(register_success=lambda peer: None),
        peer_id=None,
        node_id=None,
    )
    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(reconnect.ping_lost_peers(node, {helper}), 0.5))
    assert len(table) == 1
    assert len(looks) == reconnect.SEARCHES


def test_lost_peers_are_remembered_before_those_that_are_there_until_they_have_been_silent_for_long():
    present = [f"present {number}" for number in range(reconnect.MAX_REMEMBERED)]
    lost = {"lost": 3, "back": 3, "dead": reconnect.MAX_UNANSWERED}
    kept = reconnect.remembered(lost, [*present, "back"])
    assert len(kept) == reconnect.MAX_REMEMBERED
    assert kept["lost"] == 3
    assert "dead" not in kept
    assert reconnect.remembered(lost, ["back"]) == {"lost": 3, "back": 0}
