"""Complaints count by admitted peers, never by one, and expire; receipts that contradict each other prove a lie."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import ValueWithExpiration

from training.swarm.admission.bans import change_bans
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.passes import MAX_PASS_BYTES, Pass
from training.swarm.averaging import complaints as module
from training.swarm.averaging.complaints import (
    EVIDENCE,
    MAX_COMPLAINTS,
    MAX_REDUCERS,
    Complaints,
    read_evidence,
)
from training.swarm.averaging.matchmaking import UnreliablePeers
from training.swarm.averaging.receipts import Receipt, signed_bytes
from training.swarm.host.host_gate import ban_proven
from training.swarm.network.owner_keys import owner_key, owner_peer
from training.swarm.network.run_records import MAX_VALUE_BYTES

GHOST = PeerID.from_base58("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N")


class Board:
    """The DHT's records under one key."""

    def __init__(self):
        self.records = {}

    def node(self, gate=None):
        key = RSAPrivateKey()
        node = SimpleNamespace(private_key=key, gate=gate, store=self.store, get=self.get)
        node.peer_id = owner_peer(owner_key(node))
        return node

    async def store(self, key, value, expiration_time, subkey, return_future):
        self.records[subkey] = ValueWithExpiration(MSGPackSerializer.loads(MSGPackSerializer.dumps(value)), 1e10)

    async def get(self, key, latest, return_future):
        return ValueWithExpiration(dict(self.records), 1e10)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "SETTLE_S", 0.0)


@pytest.fixture
def run(tmp_path):
    """A board of records, and `member`, which creates peers with passes."""
    board, key = Board(), SigningKey.load_or_create(tmp_path / "host" / "identities" / "run.key")

    def member(name, *, admitted=True):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        node = board.node(Gate(key.public, folder / "pass", folder / "bans"))
        given = Pass(peer=str(node.peer_id), role="trainer", name=name, ends=int(time.time() + 60))
        (folder / "pass").write_bytes(given.signed(key) if admitted else b"")
        made = Complaints(node, "key", UnreliablePeers())
        made.enough = 3
        return made

    return SimpleNamespace(board=board, member=member, key=key, folder=tmp_path)


def exchange(*members):
    for member in members:
        asyncio.run(member.exchange())


def hours_later(monkeypatch):
    later = time.monotonic() + 10_000
    monkeypatch.setattr("training.swarm.averaging.matchmaking.time", SimpleNamespace(monotonic=lambda: later))


def complaining(run, count, **options):
    members = [run.member(f"complaining {number}", **options) for number in range(count)]
    for member in members:
        member.unreliable.update([], [GHOST])
    exchange(*members)
    return members


@pytest.mark.parametrize(("count", "admitted", "left_out"), [(3, True, True), (2, True, False), (9, False, False)])
def test_a_peer_waits_when_enough_admitted_peers_complain(run, count, admitted, left_out):
    complaining(run, count, admitted=admitted)
    listener = run.member("listener")
    exchange(listener)
    assert listener.unreliable.is_avoided(GHOST) == left_out
    assert listener.unreliable.in_backoff() == []  # and it does not repeat the complaints of others


def test_one_peer_counts_once_whatever_it_says(run):
    [loud] = complaining(run, 1)
    run.board.records[owner_key(loud.dht)].value["absent"] *= 100
    listener = run.member("listener")
    listener.enough = 2
    exchange(listener)
    assert not listener.unreliable.is_avoided(GHOST)


def test_a_copied_pass_admits_no_complaint(run):
    [honest] = complaining(run, 1)
    said = run.board.records[owner_key(honest.dht)]
    for _ in range(9):
        run.board.records[owner_key(run.board.node())] = said
    listener = run.member("listener")
    exchange(listener)
    assert not listener.unreliable.is_avoided(GHOST)


@pytest.mark.parametrize(("members", "enough"), [(1, 2), (2, 2), (3, 2), (4, 3), (7, 4), (10, 6)])
def test_a_minority_of_a_group_leaves_out_nobody(run, members, enough):
    listener = run.member("listener")
    listener.due_s = float("inf")
    listener.round_over(b"group", [PeerID(bytes([n]) * 34) for n in range(members)], {})
    assert listener.enough == enough


def test_complaints_expire(run, monkeypatch):
    complaining(run, 3)
    listener = run.member("listener")
    exchange(listener)
    hours_later(monkeypatch)
    assert not listener.unreliable.is_avoided(GHOST)


def receipt(node, digest, group=b"group"):
    """A receipt that the node signs for its last part."""
    now = int(time.time())
    signature = node.private_key.sign(signed_bytes(group, now, 3, digest))
    return Receipt(owner_key(node), group, now, 3, digest, signature)


def given(member, reducer, digest):
    member.met[reducer.peer_id] = None
    member.receipts[b"group"] = {reducer.peer_id: receipt(reducer, digest * 32)}
    return member


def test_two_receipts_that_contradict_each_other_reach_the_host_which_bans(run):
    liar = run.board.node()
    one, other = given(run.member("one"), liar, b"1"), given(run.member("other"), liar, b"2")
    third, host = given(run.member("third"), liar, b"1"), run.member("host")
    exchange(one, other, one, other, third, host)
    everybody = (one, other, third, host)
    assert [set(member.proven) for member in everybody] == [{liar.peer_id}] * 4
    assert all(member.unreliable.is_avoided(liar.peer_id) for member in everybody)
    evidence = run.folder / "host" / EVIDENCE / f"{liar.peer_id}.json"
    assert read_evidence(evidence) == liar.peer_id
    [line] = ban_proven(run.folder / "host")
    assert line.startswith(f"{liar.peer_id} is banned: it signed two different averages")
    assert str(liar.peer_id) in host.gate.current_bans().banned
    change_bans(run.folder / "host", run.key, str(liar.peer_id), banned=False)
    exchange(one, host)
    assert ban_proven(run.folder / "host") == []  # the host has the last word
    [line] = ban_proven(run.folder / "one")
    assert "should be banned by the run's host" in line


def test_a_proven_liar_stays_out_until_the_host_that_banned_it_readmits_it(run, monkeypatch):
    accuser, member, host = run.member("accuser"), run.member("member"), run.member("host")
    liar = lying(run, accuser)
    exchange(accuser, member)
    hours_later(monkeypatch)
    member.unreliable.update([liar.peer_id], [])
    exchange(member)
    assert member.unreliable.is_avoided(liar.peer_id)
    for banned in (True, False):
        change_bans(run.folder / "host", run.key, str(liar.peer_id), banned=banned)
        host.gate.current_bans()
        member.gate.learn_bans(host.gate.bans_statement)
        exchange(accuser, member)
    assert not member.unreliable.is_avoided(liar.peer_id)


@pytest.mark.parametrize("days", [1, -3])
def test_a_proof_is_spent_after_a_day(run, monkeypatch, days):
    accuser, member = run.member("accuser"), run.member("member")
    liar = lying(run, accuser)
    member.met[liar.peer_id] = None
    exchange(accuser, member)
    assert member.unreliable.is_avoided(liar.peer_id)
    assert member.shown
    now = time.time() + 86400 * days + 60
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic))
    for gate in (accuser.gate, member.gate):
        monkeypatch.setattr(gate, "verify", lambda *_: SimpleNamespace(ends=now + 60))
    exchange(member, accuser, member)
    assert not member.unreliable.is_avoided(liar.peer_id)
    assert not member.proven
    assert member.shown == []


def test_evidence_is_saved_as_soon_as_there_is_room(run, monkeypatch, caplog):
    accuser, host = run.member("accuser"), run.member("host")
    liar, folder = lying(run, accuser), run.folder / "host" / EVIDENCE
    folder.write_text("in the way")
    exchange(accuser, host)
    assert caplog.text.count(f"the evidence against {liar.peer_id} was not saved yet") == 1
    folder.unlink()
    monkeypatch.setattr(host.dht, "get", lambda *_, **__: 1 / 0)  # no record can be read
    exchange(host)
    assert read_evidence(folder / f"{liar.peer_id}.json") == liar.peer_id


def test_who_disputes_an_honest_receipt_proves_nothing(run):
    honest, liar = run.board.node(), run.member("liar")
    one = given(run.member("one"), honest, b"1")
    forged = receipt(liar.dht, b"2" * 32)
    liar.receipts[b"group"] = {honest.peer_id: replace(forged, owner=owner_key(honest))}
    liar.shown = list(liar.receipts[b"group"].values())
    exchange(liar, one, liar, one)
    assert one.shown == list(one.receipts[b"group"].values())
    assert not one.proven
    assert not one.unreliable.is_avoided(honest.peer_id)
    assert not (run.folder / "one" / EVIDENCE).exists()


def lying(run, accuser):
    """A peer whose key signs two averages of one part, as `accuser` shows."""
    liar = run.board.node()
    accuser.shown = [receipt(liar, digest * 32) for digest in (b"1", b"2")]
    return liar


@pytest.mark.parametrize(("admitted", "proofs"), [(True, 1), (False, 0)])
def test_a_peer_that_makes_up_liars_fills_no_room(run, admitted, proofs):
    accuser, listener = run.member("accuser", admitted=admitted), run.member("listener")
    for _ in range(3):
        lying(run, accuser)
        asyncio.run(accuser.publish())
        asyncio.run(listener.exchange())
    assert len(listener.proven) == proofs


def test_made_up_liars_are_not_passed_on(run):
    accuser, listener, other = (run.member(name) for name in ("accuser", "listener", "other"))
    for one in (listener, other):
        lying(run, accuser)
        asyncio.run(accuser.publish())
        asyncio.run(one.exchange())
    asyncio.run(listener.exchange())
    assert [len(one.proven) for one in (listener, other)] == [1, 1]
    assert listener.shown == other.shown == []


def test_those_met_last_are_remembered(run, monkeypatch):
    monkeypatch.setattr(module, "MAX_MET", 3)
    listener = run.member("listener")
    listener.due_s = float("inf")
    partner, *passing = (PeerID(bytes([n]) * 34) for n in range(6))
    for peer in passing:
        listener.round_over(b"group", [partner, peer], {})
    assert list(listener.met) == [passing[-2], partner, passing[-1]]


def test_any_number_of_lies_by_those_it_met_is_proven(run):
    accuser, listener = run.member("accuser"), run.member("listener")
    listener.due_s = float("inf")
    for count in (1, 2, 3):
        liar = lying(run, accuser)
        listener.round_over(b"group", [liar.peer_id], {})
        asyncio.run(accuser.publish())
        asyncio.run(listener.exchange())
        assert len(listener.proven) == count


def test_nothing_is_told_while_all_is_well(run):
    exchange(run.member("one"), run.member("other"))
    assert run.board.records == {}


@pytest.mark.parametrize("content", ["[]", "[1, 2]", "nothing", '[["QQ==", "QQ==", 3, 3, "QQ==", "QQ=="]]'])
def test_evidence_that_proves_nothing_is_said_to(run, content):
    folder = run.folder / "host" / EVIDENCE
    folder.mkdir()
    (folder / "made-up.json").write_text(content)
    with pytest.raises(ValueError, match=r"not hold two receipts|not JSON|proves nothing"):
        read_evidence(folder / "made-up.json")
    [line] = ban_proven(run.folder / "host")
    assert "made-up.json" in line
    assert ban_proven(run.folder / "host") == []


@pytest.mark.parametrize(
    "said",
    [
        {"absent": 3, "receipts": 3, "digests": 3, "group": 3, "pass": 3},
        {"absent": [3, None], "receipts": [3, None], "digests": {}, "group": [], "pass": []},
        {"receipts": [[b"x", b"x", 1, 1, b"x", b"x"]], "digests": {b"x": 3}, "group": b"group", "pass": "x" * 99},
    ],
)
def test_a_record_of_nonsense_is_passed_over(run, said, caplog):
    run.board.records[owner_key(run.board.node())] = ValueWithExpiration(said, 1e10)
    run.board.records[b"no key"] = ValueWithExpiration(said, 1e10)
    complaining(run, 3)
    listener = given(run.member("listener"), run.board.node(), b"1")
    exchange(listener)
    assert listener.unreliable.is_avoided(GHOST)


def test_the_longest_record_has_room(run):
    sizes = []

    async def store(key, value, expiration_time, subkey, return_future):
        sizes.append(len(MSGPackSerializer.dumps(value)))

    told = run.member("told")
    told.dht.store = store
    told.unreliable.update([], [GHOST] + [PeerID(bytes([n]) * 34) for n in range(2 * MAX_COMPLAINTS)])
    told.receipts[b"g" * 20] = {
        PeerID(bytes([n]) * 34): receipt(run.board.node(), b"1" * 32) for n in range(MAX_REDUCERS + 1)
    }
    for count in (0, 1, 2):
        told.shown = [receipt(told.dht, b"1" * 32, b"g" * 20)] * count
        asyncio.run(told.publish())
    pass_bytes, signature_bytes = len(told.gate.own_statement), 400
    print(f"{sizes} bytes, {pass_bytes} of them a pass")
    assert max(sizes) - pass_bytes + 1024 + signature_bytes <= MAX_VALUE_BYTES
    assert pass_bytes < 1024 < MAX_PASS_BYTES
