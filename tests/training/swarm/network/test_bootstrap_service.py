"""What helpers serve, between two real nodes on loopback."""

import asyncio
import dataclasses
import os
import socket
import time
from functools import partial
from types import SimpleNamespace

import pytest

from dalle_lean.io.files import sha256_file
from training.swarm.config import SwarmSection, SwarmSettings, write_settings
from training.swarm.network import bootstrap_service as offer
from training.swarm.network.addresses import peer_of
from training.swarm.network.bootstrap_service import (
    BootstrapService,
    Unanswered,
    call_each,
    fetch_public,
    fetch_run,
    fetch_settings,
    is_reachable,
    offer_run,
    remote_time,
)
from training.swarm.network.dht import open_dht
from training.swarm.network.run_watch import RunWatch, is_behind

pytestmark = pytest.mark.swarm
LISTEN = ["/ip4/127.0.0.1/tcp/0"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings of a run whose tokenizer.json has more than one chunk."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tokenizer.json").write_bytes(os.urandom(offer.CHUNK_BYTES + 7))
    swarm = SwarmSection(name="offered", tokenizer_fingerprint=sha256_file(folder / "tokenizer.json"))
    return folder, SwarmSettings(swarm=swarm)


@pytest.fixture(scope="module")
def helper():
    dht = open_dht([], client_mode=False, listen=LISTEN)
    yield dht
    dht.shutdown()


@pytest.fixture(scope="module")
def address(helper):
    return str(helper.get_visible_maddrs()[0])


@pytest.fixture(scope="module")
def newcomer(address):
    dht = open_dht([address], client_mode=True)
    yield dht
    dht.shutdown()


@pytest.fixture
def run(settings, helper):
    """The folder of a run that the helper serves."""
    folder, content = settings
    (folder / "public").mkdir(exist_ok=True)
    write_settings(folder / "swarm.toml", content)
    offer_run(helper, folder)
    yield folder
    helper.run_coroutine(withdraw)


async def withdraw(_, node):
    for name in ("rpc_read", "rpc_read_public", "rpc_time", "rpc_dial_back"):
        await node.p2p.remove_protobuf_handler(BootstrapService._get_handle_name(None, name))


def test_an_address_is_enough_to_get_the_run(run, helper, newcomer, address, tmp_path):
    content = (run / "swarm.toml").read_text()
    (run / "swarm.toml").write_text(f"# what no version writes\n{content}")
    helper.run_coroutine(withdraw)
    offer_run(helper, run)
    files = fetch_run(newcomer, address)
    files.write(tmp_path)
    for name in ("swarm.toml", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (run / name).read_bytes()
    assert fetch_settings(newcomer, address) == files.settings


@pytest.mark.parametrize(
    ("ip", "data", "sent"),
    [
        ("127.0.0.1", "/home/anna/my “shards”", "/home/anna/my “shards”"),
        ("203.0.113.5", "/home/anna/my “shards”", "my “shards”"),
        ("203.0.113.5", "https://example.org/shards", "https://example.org/shards"),
        ("203.0.113.5", "", ""),
    ],
)
def test_other_machines_are_not_told_where_a_hosts_folder_is(run, settings, helper, newcomer, address, ip, data, sent):
    _, content = settings
    swarm = dataclasses.replace(content.swarm, addresses=(f"/ip4/{ip}/tcp/1/p2p/x",), data=data)
    write_settings(run / "swarm.toml", dataclasses.replace(content, swarm=swarm))
    helper.run_coroutine(withdraw)
    offer_run(helper, run)
    files = fetch_run(newcomer, address)
    assert files.settings == dataclasses.replace(content, swarm=dataclasses.replace(swarm, data=sent))
    assert ("/home/anna" in files.settings_text) == (sent == data == "/home/anna/my “shards”")


def test_the_helpers_clock_is_told(run, newcomer, address):
    assert abs(remote_time(newcomer, address) - time.time()) < 2


def test_a_newcomer_learns_whether_it_can_be_called(run, newcomer, address):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert is_reachable(newcomer, address, port)
    assert not is_reachable(newcomer, address, port)


def test_a_port_that_is_none_is_refused_by_the_helper(run, newcomer, address):
    with pytest.raises(Unanswered, match="no port 0"):
        is_reachable(newcomer, address, 0)


def test_another_tokenizer_than_the_settings_name_is_refused(run, settings, helper, newcomer, address):
    write_settings(
        run / "swarm.toml", dataclasses.replace(settings[1], swarm=SwarmSection(tokenizer_fingerprint="0" * 64))
    )
    helper.run_coroutine(withdraw)
    offer_run(helper, run)
    with pytest.raises(Unanswered, match=r"another tokenizer\.json than"):
        fetch_run(newcomer, address)


def test_a_newcomer_takes_no_more_than_a_file_may_have(run, newcomer, address, monkeypatch):
    monkeypatch.setitem(offer.LIMITS_BYTES, "tokenizer.json", 1000)
    with pytest.raises(Unanswered, match="more than 1000 bytes"):
        fetch_run(newcomer, address)


def test_a_helper_offers_no_file_that_newcomers_would_not_take(run, helper, monkeypatch):
    monkeypatch.setitem(offer.LIMITS_BYTES, "tokenizer.json", 1000)
    with pytest.raises(ValueError, match="newcomers accept 1000"):
        offer_run(helper, run)


def test_what_lies_in_the_public_folder_is_handed_out_as_it_is_now(run, newcomer, address):
    for content in (b"{}", b"{1}"):
        (run / "public" / "attested-Qm1.json").write_bytes(content)
        assert fetch_public(newcomer, address, "attested-Qm1.json") == content


def test_a_large_public_file_is_handed_out_in_chunks(run, newcomer, address):
    content = bytes(offer.CHUNK_BYTES) + b"the end"
    (run / "public" / "large").write_bytes(content)
    pieces = [fetch_public(newcomer, address, "large", start) for start in (0, offer.CHUNK_BYTES, len(content))]
    assert pieces == [content[: offer.CHUNK_BYTES], b"the end", b""]
    with pytest.raises(Unanswered, match="no byte -1"):
        fetch_public(newcomer, address, "large", -1)


def test_a_chunk_that_is_larger_than_helpers_send_is_refused_from_one_and_left_out_of_several(
    run, newcomer, address, monkeypatch
):
    (run / "public" / "large").write_bytes(bytes(8))
    monkeypatch.setattr(offer, "CHUNK_BYTES", 7)  # here, not in the helper's process
    with pytest.raises(Unanswered, match="sends more than 7 bytes of a file at once"):
        fetch_public(newcomer, address, "large")
    assert call_each(newcomer, {address: "large"}, "rpc_read_public", is_json=False) == {}


@pytest.mark.parametrize("method", ["rpc_read", "rpc_read_public"])
@pytest.mark.parametrize("name", ["../swarm.toml", "../id", "absent.json", ".hidden", ""])
def test_nothing_else_is_handed_out(run, newcomer, address, method, name):
    (run / "public" / ".hidden").write_bytes(b"secret")
    with pytest.raises(Unanswered, match="no file"):
        offer.call(newcomer, address, method, uid=name, metadata=0, is_json=False)


def test_a_helper_without_a_run_is_said(helper, newcomer, address):
    with pytest.raises(Unanswered, match="did not answer read"):
        fetch_run(newcomer, address)


async def answer_late(*_, peer, **__):
    await asyncio.sleep(2)
    return f'"{peer}"'.encode()


def test_helpers_that_answer_late_are_waited_for_together(address, monkeypatch):
    monkeypatch.setattr(offer, "ask", answer_late)
    peer = peer_of(address)
    addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for port in range(1, 6)]
    dht = open_dht([address], client_mode=True)
    try:
        started = time.monotonic()
        found = call_each(dht, dict.fromkeys(addresses, ""), "rpc_time")
        assert time.monotonic() - started < 6
    finally:
        dht.shutdown()
    assert found == dict.fromkeys(addresses, str(peer))


def test_of_several_helpers_those_that_do_not_answer_are_left_out(run, newcomer, address):
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    assert list(call_each(newcomer, {nobody: "", address: ""}, "rpc_time")) == [address]
    assert call_each(newcomer, {address: "absent"}, "rpc_read_public", is_json=False) == {}


@pytest.mark.parametrize("address", ["", "example.org:31337", "/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1/p2p/0"])
def test_what_is_no_address_is_told_what_one_looks_like(address):
    with pytest.raises(ValueError, match="looks like /ip4"):
        peer_of(address)


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr("training.swarm.network.run_watch.WATCH_INTERVAL_S", 0.1)


@pytest.mark.usefixtures("often")
def test_who_is_in_a_run_that_is_taken_back_is_told_once(run, settings, helper, newcomer, address):
    before = settings[1]
    watch = RunWatch(newcomer, before, [address])
    time.sleep(0.5)
    assert watch.moved is None
    after = dataclasses.replace(before, swarm=dataclasses.replace(before.swarm, name="offered-back1"))
    write_settings(run / "swarm.toml", after)
    helper.run_coroutine(withdraw)
    offer_run(helper, run)
    watch.thread.join(timeout=30)
    assert not watch.thread.is_alive()
    assert "rolled back to an earlier step and goes on as offered-back1" in watch.moved


@pytest.mark.usefixtures("often")
def test_settings_of_before_a_rollback_which_a_helper_elsewhere_still_serves_are_passed_over(
    run, settings, newcomer, address
):
    before = settings[1]
    after = dataclasses.replace(before, swarm=dataclasses.replace(before.swarm, name="offered-back1"))
    watch = RunWatch(newcomer, after, [address])
    time.sleep(0.5)
    assert watch.moved is None
    watch.close()
    assert is_behind(before, after)
    assert not is_behind(after, before)


def test_strangers_who_wait_for_a_dial_hold_no_memory_and_not_for_long(run, monkeypatch):
    async def hosts_of(p2p, caller):
        return ["192.0.2.1"]

    service = offer.BootstrapService(None, {}, run)
    ask = partial(offer.runtime_pb2.ExpertRequest, metadata=b"31337")
    with pytest.raises(ValueError, match="more than a port"):
        asyncio.run(service.rpc_dial_back(ask(uid="x" * 100), None))
    monkeypatch.setattr(offer, "hosts_of", hosts_of)
    monkeypatch.setattr(offer, "CALL_TIMEOUT_S", 0.1)
    service.dials = asyncio.Semaphore(0)
    with pytest.raises(TimeoutError):
        asyncio.run(service.rpc_dial_back(ask(), SimpleNamespace(remote_id=None)))


@pytest.mark.usefixtures("often")
def test_a_helper_that_is_away_for_a_while_is_asked_again(helper, newcomer, address, settings):
    watch = RunWatch(newcomer, settings[1], [address])
    time.sleep(0.5)
    assert watch.thread.is_alive()
    assert watch.moved is None
    watch.close()


def test_nothing_is_known_of_the_end_once_the_node_is_shut_down(newcomer, settings):
    watch = RunWatch(newcomer, settings[1], [])
    newcomer.shutdown()
    assert watch.donors_step() == -1
    watch.close()
