"""What reducers sign: one receipt of a part for all its senders; two of them prove a lie.

Answers are differences from what each sender sent, rounded to 8 bits, so no two are alike. A reducer therefore signs,
part by part, the hashes of all answers and a few values of its average. Which values follows from the hashes: it must
decide what it answers before it can know. Each sender compares these values with its answer. What remains is to sign
different receipts for one part, and two of these are the proof.
"""

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256, shake_256
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey
from torch import Tensor

from dalle_lean.io.files import read_json, write_json
from training.swarm.host_peers import owner_peer
from training.swarm.observe.peer_metrics import OWNER

HASH_BYTES = 16
SAMPLED = 256
"""Values of each part."""
MAX_MISSES = SAMPLED // 5
"""8 bits clip what is more than three deviations from the mean: by Chebyshev's inequality at most a ninth of a part."""
ROUNDING_DEVIATIONS = 0.25
"""Ten of the steps that 8 bits have: clipping makes the deviation smaller that the receiver sees."""
ROUNDING_SHARE, ROUNDING_LEAST = 1e-4, 1e-7
"""Of float32 beside large values, and of float16 near zero."""
MAX_STATEMENT_BYTES = 2**16
MAX_CLOCK_ERROR_S, REMEMBERED_S = 600, 3600.0
"""Between two peers; how long a group's id is remembered, more than receipts of one round can be apart."""


@dataclass(frozen=True)
class Receipt:
    """What is signed of a part.

    Args:
        owner: the reducer's public key, as in its records.
        group: id of the group.
        time: when it was signed, in seconds since 1970.
        part: its number among those that this reducer averages.
        digest: of the rest of the statement and, through it, of all earlier parts.
    """

    owner: bytes
    group: bytes
    time: int
    part: int
    digest: bytes
    signature: bytes

    @property
    def reducer(self) -> PeerID | None:
        """The peer whose key signed it; None if it is no receipt."""
        peer = owner_peer(self.owner)
        if peer is None:
            return None
        key = RSAPublicKey.from_bytes(*OWNER.findall(self.owner))
        return peer if key.verify(signed_bytes(self.group, self.time, self.part, self.digest), self.signature) else None

    @property
    def place(self) -> tuple[bytes, bytes, int]:
        """A reducer that signs two digests for one place has lied."""
        return self.owner, self.group, self.part

    @classmethod
    def parse(cls, content: Any) -> Self:
        """Of a list that anybody may have sent, the signature not checked; ValueError if it cannot be a receipt."""
        kinds = (bytes, bytes, int, int, bytes, bytes)
        if not isinstance(content, list | tuple) or [type(value) for value in content] != [*kinds]:
            raise ValueError("not a receipt")
        return cls(*content)


def contradiction(one: Receipt, other: Receipt) -> PeerID | None:
    """The reducer that signed both, if no honest one can have: SignedGroups keeps it from signing for an id twice."""
    if one.place != other.place or one.digest == other.digest or abs(one.time - other.time) > 3 * MAX_CLOCK_ERROR_S:
        return None
    if one.reducer is None:
        return None
    return other.reducer


class SignedGroups:
    """The groups that a peer has signed receipts in, over restarts.

    Whoever leads a group chooses its id: with that of an earlier one it would have an honest reducer contradict itself.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.times: dict[str, float] = {}
        if path is not None and path.exists():
            self.times = {str(group): float(signed) for group, signed in read_json(path).items()}

    def add(self, group: bytes) -> None:
        """Note a group; AllreduceException if it is in there."""
        now = time.time()
        self.times = {known: signed for known, signed in self.times.items() if signed > now - REMEMBERED_S}
        if group.hex() in self.times:
            raise AllreduceException("the group has the id of an earlier one")
        self.times[group.hex()] = now
        if self.path is not None:
            write_json(self.path, self.times)


class Signer:
    """A reducer's side in one group.

    Args:
        timeout_s: how long to wait for the answer to a sender that has just failed.
    """

    def __init__(self, key: RSAPrivateKey, owner: bytes, group: bytes, timeout_s: float):
        self.key, self.owner, self.group, self.timeout_s = key, owner, group, timeout_s
        self.previous = b""
        self.hashes: dict[int, dict[int, bytes]] = {}
        """By part, then by sender."""
        self.statements: dict[int, asyncio.Future[bytes]] = {}

    async def statement(
        self, part: int, sender: int, answer: bytes, average: Tensor, senders: Collection[int]
    ) -> bytes:
        """What goes to all `senders` of a part with their answers, once these are known; ValueError if too late."""
        hashes = self.hashes.setdefault(part, {})
        made = self.statements.setdefault(part, asyncio.get_running_loop().create_future())
        if made.done():
            raise ValueError("the answers to the other senders were signed without this one")
        hashes[sender] = hash_of(answer)
        if not hashes.keys() >= set(senders):
            await asyncio.wait([made], timeout=self.timeout_s)
        if not made.done():
            made.set_result(self.sign(part, [hashes[number] for number in sorted(hashes)], average))
            del self.hashes[part]
        return made.result()

    def sign(self, part: int, hashes: list[bytes], average: Tensor) -> bytes:
        values = sampled(average, hashes, self.group, part).numpy().astype("<f4").tobytes()
        content, now = [self.previous, hashes, values], int(time.time())
        self.previous = digest_of(content)
        signature = self.key.sign(signed_bytes(self.group, now, part, self.previous))
        receipt = [self.owner, self.group, now, part, self.previous, signature]
        packed: bytes = MSGPackSerializer.dumps([receipt, content])
        return packed


def check_statement(
    statement: bytes,
    answer: bytes,
    sent: Tensor,
    delta: Tensor,
    *,
    reducer: PeerID,
    group: bytes,
    part: int,
    previous: bytes,
) -> Receipt:
    """The receipt in what came with an answer; ValueError unless the reducer owes this very answer to everybody.

    Args:
        answer: as it arrived; it means `delta`.
        sent: what the answer is the difference from.
        previous: digest of the part before, empty for the first.
    """
    try:
        if len(statement) > MAX_STATEMENT_BYTES:
            raise ValueError("a statement that is too long")
        signed, content = MSGPackSerializer.loads(statement)
        before, hashes, packed = content
        receipt, values = Receipt.parse(signed), torch.from_numpy(np.frombuffer(packed, "<f4").copy())
        hashed = hash_of(answer) in hashes
        expected = sampled(sent + delta, hashes, group, part)
    except Exception as error:  # a stranger's bytes may raise anything
        raise ValueError(f"no statement: {error}") from None
    if receipt.reducer != reducer or (receipt.group, receipt.part) != (group, part):
        raise ValueError("a statement of another part, or that the reducer has not signed")
    if abs(receipt.time - time.time()) > MAX_CLOCK_ERROR_S:
        raise ValueError("a statement of another time")
    if receipt.digest != digest_of(content) or before != previous or not hashed:
        raise ValueError("a statement that does not cover the answer")
    if delta.isfinite().all() and not agrees(values, expected, sent, delta):
        raise ValueError("an answer that is not the signed average")
    return receipt


def agrees(values: Tensor, expected: Tensor, sent: Tensor, delta: Tensor) -> bool:
    """Whether sampled values of an average are those of an answer but for rounding."""
    if not len(expected):
        return not len(values)
    rounding = ROUNDING_DEVIATIONS * float(delta.std(correction=0)) + ROUNDING_LEAST
    rounding += ROUNDING_SHARE * float(sent.norm()) / sent.numel() ** 0.5
    return (
        len(values) == len(expected) and int(((values - expected).abs() <= rounding).logical_not().sum()) <= MAX_MISSES
    )


def sampled(average: Tensor, hashes: list[bytes], group: bytes, part: int) -> Tensor:
    """[SAMPLED] float32, from places that follow from the hashes of all answers; none of an empty part."""
    if not average.numel():
        return torch.zeros(0)
    seed = MSGPackSerializer.dumps([hashes, group, part])
    places = np.frombuffer(shake_256(seed).digest(8 * SAMPLED), "<u8") % average.numel()
    return average.detach().flatten()[torch.from_numpy(places.astype(np.int64))].float()


def hash_of(answer: bytes) -> bytes:
    return sha256(answer).digest()[:HASH_BYTES]


def digest_of(content: list[Any]) -> bytes:
    """Of what is not sent to those who were not there."""
    return sha256(MSGPackSerializer.dumps(content)).digest()


def signed_bytes(group: bytes, time_s: int, part: int, digest: bytes) -> bytes:
    return b"dalle-lean averaged part\n" + bytes(MSGPackSerializer.dumps([group, time_s, part, digest]))
