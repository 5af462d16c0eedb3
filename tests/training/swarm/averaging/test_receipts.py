"""A reducer must send all senders of a part the same average; its own signatures prove it if it does not."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionInfo, deserialize_torch_tensor
from hivemind.p2p import P2P, PeerID
from hivemind.utils import MSGPackSerializer

from training.swarm.averaging import receipts
from training.swarm.averaging.receipts import (
    MAX_CLOCK_ERROR_S,
    MAX_STATEMENT_BYTES,
    REMEMBERED_S,
    Receipt,
    SignedGroups,
    Signer,
    check_statement,
    contradiction,
)
from training.swarm.averaging.wire import wire_compression
from training.swarm.config import WireSection
from training.swarm.network.owner_keys import IdentityKey, owner_key

GROUP = b"group"
SIZE = 20_000


@pytest.fixture(scope="module")
def reducer(tmp_path_factory):
    path = tmp_path_factory.mktemp("reducer") / "identity"
    P2P.generate_identity(str(path))
    key = IdentityKey(path)
    owner = owner_key(SimpleNamespace(private_key=key))
    return SimpleNamespace(key=key, owner=owner, peer=PeerID.from_identity(path.read_bytes()))


def signer(reducer, group=GROUP):
    return Signer(reducer.key, reducer.owner, group, timeout_s=0.1)


def on_the_wire(tensor, compression="8bit"):
    codec = wire_compression(WireSection(compression=compression, min_eight_bit_numel=1000))
    return codec.compress(tensor, CompressionInfo.from_tensor(tensor))


def answers_to(average, sent, compression="8bit"):
    """The answers as they arrive."""
    return [on_the_wire(average - part, compression) for part in sent]


def signed(signer, part, answers, average):
    async def run():
        senders = range(len(answers))
        made = [signer.statement(part, sender, answers[sender].buffer, average, senders) for sender in senders]
        return await asyncio.gather(*made)

    return asyncio.run(run())


def check(reducer, statement, answer, sent, *, group=GROUP, part=0, previous=b""):
    delta = deserialize_torch_tensor(answer)
    place = {"group": group, "part": part, "previous": previous}
    return check_statement(statement, answer.buffer, sent, delta, reducer=reducer.peer, **place)


def random(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


PARTS = {
    "gradients": random(3, SIZE),
    "one in a hundred is not zero": random(3, SIZE) * (random(3, SIZE, seed=1) > 2.3),
    "a few huge ones": random(3, SIZE) / random(3, SIZE, seed=1),
    "weights close to each other": 5 + random(SIZE) + 1e-3 * random(3, SIZE, seed=1),
    "small values": 1e-9 * random(3, SIZE),
    "all equal": torch.full((3, SIZE), 0.5),
    "zeros": torch.zeros(3, SIZE),
    "three values": random(3, 3),
    "nothing": random(3, 0),
}


@pytest.mark.parametrize("compression", ["8bit", "fp16", "fp32"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_an_honest_reducer_is_believed_by_all(reducer, parts, compression):
    if compression == "8bit" and parts.shape[1] == 0:
        pytest.skip("8 bits have no empty part")
    sent = [deserialize_torch_tensor(on_the_wire(part, compression)) for part in parts]
    average = torch.stack(sent).mean(0)
    answers = answers_to(average, sent, compression)
    statements = signed(signer(reducer), 0, answers, average)
    taken = [check(reducer, *told) for told in zip(statements, answers, sent, strict=True)]
    assert len({receipt.digest for receipt in taken}) == 1
    assert taken[0].reducer == reducer.peer


LIES = {
    "for one sender the opposite": lambda average, other: -average,
    "for one sender a third more": lambda average, other: average * 4 / 3,
    "for one sender something else in every second value": lambda average, other: torch.where(
        torch.arange(SIZE) % 2 == 0, other, average
    ),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_who_is_answered_something_else_than_what_is_signed_notices(reducer, lie):
    sent = [deserialize_torch_tensor(on_the_wire(part)) for part in random(3, SIZE)]
    average = torch.stack(sent).mean(0)
    answers = answers_to(average, sent[:2]) + answers_to(lie(average, random(SIZE, seed=9)), sent[2:])
    statements = signed(signer(reducer), 0, answers, average)
    for place in (0, 1):
        check(reducer, statements[place], answers[place], sent[place])
    with pytest.raises(ValueError, match="not the signed average"):
        check(reducer, statements[2], answers[2], sent[2])


def two_parts(reducer, average=None):
    """Statements and answers of one sender for a group of two parts, and what it sent."""
    sent = random(SIZE)
    average = sent / 2 if average is None else average
    reducing, answers = signer(reducer), answers_to(average, [sent])
    return [signed(reducing, part, answers, average)[0] for part in (0, 1)], answers[0], sent


def test_different_receipts_for_one_part_prove_the_lie_whoever_shows_them(reducer):
    lasts = []
    for average in (random(SIZE) / 2, -random(SIZE)):
        (first, second), answer, sent = two_parts(reducer, average)
        before = check(reducer, first, answer, sent)
        lasts.append(check(reducer, second, answer, sent, part=1, previous=before.digest))
    assert contradiction(*lasts) == reducer.peer
    assert contradiction(lasts[0], lasts[0]) is None
    assert contradiction(lasts[0], replace(lasts[1], digest=b"made up")) is None
    assert contradiction(lasts[0], replace(lasts[1], group=b"another")) is None
    assert contradiction(lasts[0], replace(lasts[1], part=0)) is None
    assert contradiction(lasts[0], replace(lasts[1], time=lasts[1].time + 1)) is None


def test_a_statement_counts_for_its_own_place_only(reducer):
    (first, second), answer, sent = two_parts(reducer)
    previous = check(reducer, first, answer, sent).digest
    check(reducer, second, answer, sent, part=1, previous=previous)
    for place in ({"group": b"another"}, {"part": 1}):
        with pytest.raises(ValueError, match="another part"):
            check(reducer, first, answer, sent, **place)
    with pytest.raises(ValueError, match="does not cover"):
        check(reducer, second, answer, sent, part=1, previous=b"another first part")
    with pytest.raises(ValueError, match="does not cover"):
        check(reducer, first, on_the_wire(sent), sent)
    with pytest.raises(ValueError, match="has not signed"):
        check(SimpleNamespace(peer=PeerID(b"other" * 7)), first, answer, sent)


@pytest.mark.parametrize(
    "statement",
    [
        b"",
        b"\xc1",
        MSGPackSerializer.dumps([1, 2]),
        MSGPackSerializer.dumps([[1] * 6, [b"", [b""], b"1234"]]),
        b"x" * (MAX_STATEMENT_BYTES + 1),
    ],
)
def test_an_answer_without_a_statement_is_no_average(reducer, statement):
    sent = random(SIZE)
    with pytest.raises(ValueError, match="malformed statement"):
        check(reducer, statement, on_the_wire(sent), sent)


def test_a_receipt_of_another_time_is_none_of_this_round(reducer, monkeypatch):
    (first, _), answer, sent = two_parts(reducer)
    later = time.time() + MAX_CLOCK_ERROR_S + 9
    monkeypatch.setattr(receipts, "time", SimpleNamespace(time=lambda: later))
    with pytest.raises(ValueError, match="another time"):
        check(reducer, first, answer, sent)


def test_a_leader_that_uses_an_id_again_makes_nobody_sign_twice(tmp_path, monkeypatch):
    groups = SignedGroups(tmp_path / "signed.json")
    groups.add(b"one")
    groups.add(b"other")
    for again in (groups, SignedGroups(tmp_path / "signed.json")):  # the second after a restart
        with pytest.raises(AllreduceException, match="earlier one"):
            again.add(b"one")
    later = time.time() + REMEMBERED_S + 9
    monkeypatch.setattr(receipts, "time", SimpleNamespace(time=lambda: later))
    groups.add(b"one")
    assert list(groups.times) == [b"one".hex()]
    assert REMEMBERED_S > 5 * MAX_CLOCK_ERROR_S  # receipts of two rounds cannot pass for those of one


def test_a_sender_that_fails_before_its_answer_keeps_the_others_waiting_for_a_bounded_time(reducer):
    sent = random(SIZE)
    [answer] = answers_to(sent / 2, [sent])

    async def run():
        reducing = signer(reducer)
        statement = await asyncio.wait_for(reducing.statement(0, 0, answer.buffer, sent / 2, [0, 1]), 30)
        with pytest.raises(ValueError, match="without this one"):
            await reducing.statement(0, 1, answer.buffer, sent / 2, [0, 1])
        return statement

    check(reducer, asyncio.run(run()), answer, sent)


@pytest.mark.parametrize("content", [None, [], [1] * 5, [b"x", b"x", 1, True, b"x", b"x"], [b"x"] * 6, b"12345"])
def test_what_is_no_receipt_is_not_read_as_one(content):
    with pytest.raises(ValueError, match="not a receipt"):
        Receipt.parse(content)


@pytest.mark.parametrize("owner", [b"x", b"[owner:ssh-rsa " + b"A" * 200 + b"]"])
def test_a_receipt_of_no_key_is_nobodys(owner):
    assert Receipt(owner, GROUP, 0, 0, b"x", b"x").reducer is None
