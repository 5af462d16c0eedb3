"""Real nodes: every call refuses a peer without a pass before reading anything; a ban takes effect in seconds."""

import asyncio
import inspect
import os
import re
import time
from functools import partial

import psutil
import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2P, P2PHandlerError
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.proto import averaging_pb2, dht_pb2
from hivemind.utils import get_dht_time

from tests.training.swarm.harness import wait_for
from training.swarm.admission.bans import change_bans
from training.swarm.admission.guard import AdmittedReader, GuardedClient
from training.swarm.admission.limits import MAX_HANDSHAKES
from training.swarm.averaging.state_averager import SwarmStateAverager
from training.swarm.network.bootstrap_service import run_in_node
from training.swarm.network.dht import open_dht

pytestmark = pytest.mark.swarm
SOON_S = 60


def test_hivemind_talks_to_others_only_through_what_the_guard_covers():
    """Fails if hivemind uses other methods: check which of the new ones need a guard."""
    used = set(re.findall(r"_client\.(\w+)", inspect.getsource(P2P)))
    guarded = {"add_unary_handler", "call_unary_handler", "stream_handler", "stream_open"}
    local = {"close", "connect", "identify", "listen", "list_peers", "remove_stream_handler", "remove_unary_handler"}
    assert used == guarded | local
    for name in guarded:
        theirs, ours = (inspect.signature(getattr(kind, name)).parameters for kind in (Client, GuardedClient))
        assert len(theirs) == len(ours), name
    for kind in (P2P, DHTNode, DHTProtocol):
        assert not re.search(r"(control|_child)\.(stream|call|add_unary)", inspect.getsource(kind))
    read = set(re.findall(r"reader\.(\w+)", inspect.getsource(P2P)))
    assert read == {"readexactly"} <= set(vars(AdmittedReader))
    assert re.search(r"p2p = await P2P\.create\(", inspect.getsource(DHTNode.create))
    assert re.search(
        r"self\._p2p = await self\.dht\.replicate_p2p\(\)", inspect.getsource(SwarmStateAverager._run_internal)
    )


@pytest.fixture(scope="module")
def member(network):
    return network.member("member")


@pytest.fixture(scope="module")
def stranger(network):
    return network.open("stranger", must_bootstrap=False)


@pytest.fixture(scope="module")
def averager(network):
    """The RPCs of a member that serves its state; a stranger's calls are refused before hivemind sees them."""
    import torch
    from hivemind.averaging import DecentralizedAverager

    node = network.member("averaging")
    made = DecentralizedAverager([torch.zeros(1000)], node, start=True, prefix="run_grad", client_mode=False)
    made.gate = node.gate
    yield made
    made.shutdown()


@pytest.fixture
def visitor(averager):
    """A stranger that knows the averager's address."""
    node = open_dht([str(averager.dht.get_visible_maddrs()[0])], client_mode=True, must_bootstrap=False)
    yield node
    node.shutdown()


def put(node, key):
    return node.store(key, 1, get_dht_time() + 60)


def test_members_store_and_read(network, member):
    assert put(member, "members")
    assert network.host.get("members").value == 1


def test_a_client_with_a_pass_stores_and_reads(network, member):
    client = network.member("client", client_mode=True)
    assert put(client, "clients")
    assert member.get("clients", latest=True).value == 1


async def call(_, node, peer, handle, content, is_stream):
    """The peer's answer to a raw message, or its refusal."""
    try:
        if not is_stream:
            return await asyncio.wait_for(node.p2p._client.call_unary_handler(peer, handle, content), 20)
        _, reader, writer = await node.p2p._client.stream_open(peer, (handle,))
        writer.write(content)
        return await asyncio.wait_for(reader.read(), 20)
    except P2PHandlerError as refusal:
        return str(refusal).encode()


def protobuf(message):
    """A message as hivemind sends it in a stream."""
    content = message.SerializeToString()
    return b"\0" + len(content).to_bytes(8, "big") + content


STREAMS = {
    "rpc_join_group": averaging_pb2.JoinRequest(schema_hash=b"x", expiration=1e10, gather=b"x"),
    "rpc_aggregate_part": averaging_pb2.AveragingData(group_id=b"x"),
    "rpc_download_state": averaging_pb2.DownloadRequest(),
}
UNARY = {
    "rpc_ping": dht_pb2.PingRequest(),
    "rpc_store": dht_pb2.StoreRequest(
        keys=[b"x" * 20], subkeys=[b"x"], values=[b"x"], expiration_time=[1e10], in_cache=[False]
    ),
    "rpc_find": dht_pb2.FindRequest(keys=[b"x" * 20]),
}


def test_these_are_all_calls_there_are():
    for kind, calls in ((DHTProtocol, UNARY), (SwarmStateAverager, STREAMS)):
        kind._collect_rpc_handlers()
        assert {handler.method_name for handler in kind._rpc_handlers} == set(calls)


@pytest.mark.parametrize("name", UNARY)
def test_a_stranger_is_refused_by_every_call_of_the_dht(network, stranger, name):
    before = network.host.gate.refused
    request = UNARY[name].SerializeToString()
    answer = run_in_node(
        stranger,
        partial(call, peer=network.host.peer_id, handle=f"DHTProtocol.{name}", content=request, is_stream=False),
    )
    assert b"Refused" in answer
    assert network.host.gate.refused > before


@pytest.mark.parametrize("name", STREAMS)
def test_a_stranger_is_refused_by_every_call_of_an_averager(averager, visitor, name):
    before, answer, calls = averager.gate.refused, b"", 0
    handle = f"run_grad::DecentralizedAverager.{name}"
    sent = partial(call, peer=averager.peer_id, handle=handle, content=protobuf(STREAMS[name]), is_stream=True)
    while not answer and calls < 3:  # libp2p's daemon may close a refused stream before it has passed on the answer
        answer, calls = run_in_node(visitor, sent), calls + 1
    assert answer.endswith(b"this machine has no pass for this run; join it by its address")
    assert len(answer) < 1000  # the averager's own pass, and the refusal
    assert averager.gate.refused == before + calls


@pytest.mark.parametrize("case", ["ended", "copied", "of another run"])
def test_a_pass_that_does_not_hold_gets_nobody_in(network, case, other_key):
    changes = {"ended": {"lasts_s": -1}, "of another run": {"key": other_key}}
    gate = network.gate(case, **changes.get(case, {}))
    if case == "copied":
        gate.own.path.write_bytes(network.host.gate.own_statement)
    before = network.host.gate.refused
    with pytest.raises(ValueError, match="no peer there admits this machine"):
        network.open(case, gate=gate)
    assert network.host.gate.refused > before


def test_what_a_stranger_answers_is_not_read(network):
    """A member accepts nothing from a stranger that others announce."""
    stranger = open_dht([], client_mode=False, listen=["/ip4/127.0.0.1/tcp/0"])
    try:
        assert put(stranger, "bait")
        gate = network.gate("deceived")
        address = str(stranger.get_visible_maddrs()[0])
        with pytest.raises(ValueError, match="no peer there admits this machine"):
            open_dht([address], client_mode=True, identity=network.folder / "deceived/identity", gate=gate)
    finally:
        stranger.shutdown()


@pytest.mark.long
def test_a_ban_and_its_end_reach_members_from_one_to_the_next(network, member):
    banned = network.member("banned")
    peer = str(banned.peer_id)
    assert put(banned, "before")
    assert change_bans(network.folder / "helper", network.key, peer, banned=True)  # the file of one peer alone
    began_s = time.monotonic()
    for gate in network.gates:
        wait_for(lambda gate=gate: peer in gate.current_bans().banned, SOON_S, "the ban")
    print(f"a ban reached {len(network.gates)} in {time.monotonic() - began_s:.1f} s")
    put(banned, "during")
    assert member.get("during", latest=True) is None
    assert network.host.get("during", latest=True) is None
    assert "banned" in banned.gate.own_refusal
    assert change_bans(network.folder / "helper", network.key, peer, banned=False)
    wait_for(lambda: peer not in banned.gate.current_bans().banned, SOON_S, "the end of the ban")


async def knock(_, node, peer, handle, count):
    """Open silent streams; returns how many stay open."""
    opened = [await node.p2p._client.stream_open(peer, (handle,)) for _ in range(count)]
    await asyncio.sleep(1)
    return sum(not reader.at_eof() and not reader._buffer.endswith(b"code") for _, reader, _ in opened)


def test_streams_that_say_nothing_are_closed(averager, visitor):
    before, count = averager.gate.refused, MAX_HANDSHAKES + 50
    handle = "run_grad::DecentralizedAverager.rpc_download_state"
    run_in_node(visitor, partial(knock, peer=averager.peer_id, handle=handle, count=count))
    wait_for(lambda: averager.gate.refused >= before + count, SOON_S, "the refusals")


async def flood(_, node, peer, count):
    """Call as fast as possible; returns how many calls were not refused."""

    async def ask(number):
        handle = ("DHTProtocol.rpc_store", "AdmissionService.rpc_bans")[number % 2]
        try:
            await node.p2p._client.call_unary_handler(peer, handle, os.urandom(1000))
        except P2PHandlerError:
            return False
        return True

    answered = 0
    for first in range(0, count, 200):
        answered += sum(await asyncio.gather(*map(ask, range(first, first + 200))))
    return answered


@pytest.mark.slow
def test_ten_thousand_strange_calls_do_not_grow_memory(network, stranger):
    host = psutil.Process(network.host.pid)
    before, refused = host.memory_full_info().uss, network.host.gate.refused
    flooding = partial(flood, peer=network.host.peer_id, count=10_000)
    began_s = time.monotonic()
    assert stranger.run_coroutine(flooding, return_future=True).result(timeout=250) == 0
    grown_mb = (host.memory_full_info().uss - before) / 1e6
    print(f"10,000 calls in {time.monotonic() - began_s:.0f} s: {grown_mb:.1f} MB more")
    assert network.host.gate.refused - refused >= 5000
    assert grown_mb < 20
    assert put(network.host, "after")
