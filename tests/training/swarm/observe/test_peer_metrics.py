"""Metrics that peers publish: readable by all, writable only by their owner."""

import logging
import os
import signal
import time
from contextlib import ExitStack
from functools import partial

import pytest

pytest.importorskip("hivemind")

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.utils import get_dht_time

from tests.training.swarm.harness import wait_for
from training.swarm.network.dht import open_dht
from training.swarm.network.owner_keys import IdentityKey, owner_peer
from training.swarm.observe.peer_metrics import (
    EXPIRATION_S,
    PeerMetrics,
    PeerRecord,
    Publisher,
    check_user_name,
    checked,
    metrics_key,
    read_records,
    record_validators,
)

pytestmark = pytest.mark.swarm
RUN = "records-test"
DONE = PeerMetrics(epoch=3, loss=2.5, samples=96, samples_per_s=8.0, resyncs=1, solo_steps=2)
CONTENT = {
    **DONE.record_fields(),
    "role": "trainer",
    "client_mode": False,
    "version": "0.1.0",
    "user": "A. Lovelace",
    "started": 1000.0,
    "time": 1060.0,
}


@pytest.fixture
def nodes(tmp_path):
    """Opens nodes on loopback that know the first one; closes them, and their publishers."""
    with ExitStack() as stack:
        opened = []

        def open_node(name, *, client_mode=False, protected=True):
            addresses = [str(opened[0].get_visible_maddrs()[0])] if opened else []
            options = {"listen": ["/ip4/127.0.0.1/tcp/0"], "identity": tmp_path / name, "reads_all": not protected}
            node = open_dht(addresses, client_mode=client_mode, **options)
            stack.callback(node.shutdown)
            opened.append(node)
            if protected:
                node.add_validators(record_validators(RUN))
            return node

        yield open_node


@pytest.fixture
def publisher(nodes):
    """A peer in client mode that has published DONE at a helper."""
    nodes("helper")
    peer = Publisher(nodes("peer", client_mode=True), RUN, user="A. Lovelace")
    peer.publish(DONE)
    wait_for(lambda: peer.published, 20, "publishing")
    yield peer
    peer.close()


def store(node, value, *, subkey=None):
    return node.store(metrics_key(RUN), value, get_dht_time() + EXPIRATION_S, subkey=subkey)


def test_a_peer_in_client_mode_is_read_by_its_peer_id(publisher, nodes):
    records = read_records(nodes("monitor", client_mode=True, protected=False), RUN)
    [(peer_id, record)] = records.by_peer.items()
    assert peer_id == publisher.dht.peer_id.to_base58()
    assert (record.step, record.loss, record.samples, record.resyncs, record.solo_steps) == (3, 2.5, 96, 1, 2)
    assert (record.user, record.client_mode, records.refused) == ("A. Lovelace", True, 0)


def test_nobody_else_overwrites_a_record(publisher, nodes):
    stranger = nodes("stranger", client_mode=True, protected=False)
    assert not store(stranger, {**CONTENT, "samples": 0}, subkey=publisher.subkey)  # the helper does not keep it
    assert not store(stranger, "gone")  # nor does a plain value take the place of all records
    [record] = read_records(stranger, RUN).by_peer.values()
    assert record.samples == 96


def test_forgeries_of_a_lying_node_are_counted_and_hide_nothing(publisher, nodes):
    liar = nodes("liar", protected=False)
    forge = partial(keep_forgery, subkey=publisher.subkey, content={**CONTENT, "samples": 0})
    assert liar.run_coroutine(forge)
    reader = nodes("monitor", client_mode=True, protected=False)
    wait_for(lambda: read_records(reader, RUN).refused == 1, 20, "a refusal")
    [record] = read_records(reader, RUN).by_peer.values()
    assert record.samples == 96


async def keep_forgery(_dht, node, subkey, content):
    value = DHTProtocol.serializer.dumps(content)
    key = DHTID.generate(source=metrics_key(RUN))
    return node.protocol.storage.store(key, value, get_dht_time() + 2 * EXPIRATION_S, subkey=subkey)


def test_a_record_of_any_type_is_counted(nodes):
    liar = nodes("liar", protected=False)
    assert liar.run_coroutine(keep_a_list)
    reader = nodes("monitor", client_mode=True, protected=False)
    wait_for(lambda: read_records(reader, RUN).refused == 1, 20, "a refusal")


async def keep_a_list(_dht, node):
    key, expiration = DHTID.generate(source=metrics_key(RUN)), get_dht_time() + EXPIRATION_S
    return node.protocol.storage.store(key, ["not", "bytes"], expiration, subkey=b"anybody")


def test_a_silent_peer_is_still_told_of(nodes, monkeypatch):
    monkeypatch.setattr("training.swarm.observe.peer_metrics.PUBLISH_INTERVAL_S", 0.1)
    publisher = Publisher(nodes("peer"), RUN)
    publisher.publish(DONE)
    wait_for(lambda: publisher.published >= 3, 20, "publishing again and again")
    publisher.close()


def test_a_peer_that_leaves_withdraws_its_record_and_keeps_what_it_gave(publisher, nodes):
    peer = publisher.dht.peer_id.to_base58()
    reader = nodes("monitor", client_mode=True, protected=False)
    assert read_records(reader, RUN).present(peer)
    publisher.close(has_left=True)
    records = read_records(reader, RUN)
    assert records.present(peer) is None
    assert (records.by_peer[peer].samples, records.refused) == (96, 0)


def test_metrics_that_cannot_be_published_are_said_in_the_log(nodes, caplog):
    publisher = Publisher(nodes("peer"), RUN, role="king")
    publisher.latest = {**publisher.constant, **DONE.record_fields()}
    logger = logging.getLogger("hivemind")
    logger.addHandler(caplog.handler)
    try:
        publisher.store()
    finally:
        logger.removeHandler(caplog.handler)
    assert publisher.published == 0
    assert "the metrics were not published: ValidationError" in caplog.text


def test_publishing_never_waits_for_the_network(nodes):
    node = nodes("peer")
    publisher = Publisher(node, RUN)
    os.kill(node.pid, signal.SIGSTOP)
    try:
        started = time.perf_counter()
        for step in range(100):
            publisher.publish(PeerMetrics(epoch=step, loss=1.0))
        assert time.perf_counter() - started < 1.0
    finally:
        os.kill(node.pid, signal.SIGCONT)
    wait_for(lambda: read_records(node, RUN).by_peer, 20, "a record")
    publisher.close()


def test_a_peer_that_has_no_loss_yet_says_so():
    assert PeerMetrics().record_fields()["loss"] is None


def test_a_user_name_that_a_terminal_would_obey_is_refused():
    with pytest.raises(ValueError, match="user name"):
        check_user_name("\x1b[2J")


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    from hivemind.p2p import P2P

    identity = tmp_path_factory.mktemp("identity") / "id"
    P2P.generate_identity(str(identity))
    return RSASignatureValidator(IdentityKey(identity))


def is_believed(signer, content, subkey=None):
    """Whether a record with this content, signed by its owner, passes."""
    serialize = DHTProtocol.serializer.dumps
    subkey = signer.local_public_key if subkey is None else subkey
    key = DHTID.generate(source=metrics_key(RUN)).to_bytes()
    record = DHTRecord(key, serialize(subkey), serialize(content), get_dht_time() + EXPIRATION_S)
    signed = DHTRecord(record.key, record.subkey, signer.sign_value(record), record.expiration_time)
    owner, _ = checked(signed, CompositeValidator(record_validators(RUN)))
    return owner is not None


def test_a_whole_record_is_believed(signer):
    assert is_believed(signer, CONTENT)
    assert is_believed(signer, {**CONTENT, "loss": None, "user": None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 2**60),
        ("step", 1.0),
        ("loss", float("nan")),
        ("loss", float("inf")),
        ("loss", -0.5),
        ("samples", -1),
        ("samples", True),
        ("samples_per_s", float("inf")),
        ("role", "king"),
        ("client_mode", 1),
        ("user", "a" * 33),
        ("user", "\x1b[2J"),
        ("user", "two\nlines"),
        ("version", "v" * 33),
        ("time", float("nan")),
    ],
)
def test_a_record_with_a_value_out_of_range_is_refused(signer, field, value):
    assert not is_believed(signer, {**CONTENT, field: value})


def test_a_record_with_a_field_too_many_or_too_few_is_refused(signer):
    assert not is_believed(signer, {**CONTENT, "note": "x" * 10_000})
    assert not is_believed(signer, {name: CONTENT[name] for name in CONTENT if name != "samples"})


def test_one_owner_has_one_record(signer):
    assert not is_believed(signer, CONTENT, subkey=b"second " + signer.local_public_key)
    assert owner_peer(b"second " + signer.local_public_key) is None


def test_the_record_of_a_contribution_is_whole():
    assert PeerRecord(**CONTENT).dict() == CONTENT
