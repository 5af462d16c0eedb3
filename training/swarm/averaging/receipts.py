"""Signed receipts of reducers: one for all senders of a part. Two different receipts for one part prove a lie.

Answers differ between senders: each is the average minus what that sender sent, in 8 bits. A reducer therefore signs,
for each part, the hashes of all answers and a sample of the values of its average. The hashes determine which values,
so the reducer must commit to its answers first. Each sender compares the sample with its answer. A reducer that lies
has to sign different receipts for the same part, and any two of them are the proof.
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
from hivemind.utils.crypto import RSAPrivateKey
from torch import Tensor

from dalle_lean.io.files import read_json, write_json
from training.swarm.network.owner_keys import signer_of

HASH_BYTES = 16
SAMPLED = 256  # values per part in a receipt
MAX_MISSES = SAMPLED // 5
"""8 bits clip values beyond three deviations of the mean: by Chebyshev's inequality at most a ninth of a part."""
ROUNDING_DEVIATIONS = 0.25  # ten quantization steps: clipping shrinks the deviation that the receiver sees
ROUNDING_SHARE, ROUNDING_LEAST = 1e-4, 1e-7  # rounding of float32 next to large values, and of float16 near zero
MAX_STATEMENT_BYTES = 2**16
MAX_CLOCK_ERROR_S, REMEMBERED_S = 600, 3600.0
"""Between two peers' clocks; how long group ids are remembered, which is longer than a round can take."""


@dataclass(frozen=True)
class Receipt:
    """A reducer's signature for one part.

    Args:
        owner: the reducer's public key, as in its DHT records.
        group: id of the group.
        time: when it was signed, in seconds since 1970.
        part: index among the parts that this reducer averages.
        digest: of the statement's content and, chained through it, of all earlier parts.
    """

    owner: bytes
    group: bytes
    time: int
    part: int
    digest: bytes
    signature: bytes

    @property
    def reducer(self) -> PeerID | None:
        """The peer whose key signed it; None if the signature is invalid."""
        return signer_of(self.owner, signed_bytes(self.group, self.time, self.part, self.digest), self.signature)

    @property
    def part_id(self) -> tuple[bytes, bytes, int]:
        """Identifies a part: a reducer that signs two digests for one part has lied."""
        return self.owner, self.group, self.part

    @classmethod
    def parse(cls, content: Any) -> Self:
        """Parse an untrusted list, the signature not checked; ValueError if it is malformed."""
        kinds = [bytes, bytes, int, int, bytes, bytes]
        if not isinstance(content, list | tuple) or list(map(type, content)) != kinds:
            raise ValueError("not a receipt")
        return cls(*content)


def contradiction(one: Receipt, other: Receipt) -> PeerID | None:
    """The reducer that signed both, if they prove a lie; an honest one signs once per group, see SignedGroups."""
    if one.part_id != other.part_id or one.digest == other.digest or abs(one.time - other.time) > 3 * MAX_CLOCK_ERROR_S:
        return None
    return None if one.reducer is None else other.reducer


class SignedGroups:
    """The groups in which a peer has signed receipts, across restarts.

    The leader of a group chooses its id: by reusing one, it could make an honest reducer contradict itself.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.times: dict[str, float] = {}
        if path is not None and path.exists():
            self.times = {str(group): float(signed) for group, signed in read_json(path).items()}

    def add(self, group: bytes) -> None:
        """Record a group; AllreduceException if its id was used before."""
        now = time.time()
        self.times = {known: signed for known, signed in self.times.items() if signed > now - REMEMBERED_S}
        if group.hex() in self.times:
            raise AllreduceException("the group reuses the id of an earlier one")
        self.times[group.hex()] = now
        if self.path is not None:
            write_json(self.path, self.times)


class Signer:
    """A reducer's side in one group.

    Args:
        timeout_s: how long to wait for the answers to the other senders, of which one may have failed.
    """

    def __init__(self, key: RSAPrivateKey, owner: bytes, group: bytes, timeout_s: float):
        self.key, self.owner, self.group, self.timeout_s = key, owner, group, timeout_s
        self.previous = b""
        self.hashes: dict[int, dict[int, bytes]] = {}  # of the answers, by part, then by sender
        self.statements: dict[int, asyncio.Future[bytes]] = {}

    async def statement(
        self, part: int, sender: int, answer: bytes, average: Tensor, senders: Collection[int]
    ) -> bytes:
        """The signed statement that goes with the answers to all `senders` of a part, once all answers are known;
        ValueError for an answer after it was signed."""
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
    """The receipt in the statement that came with an answer; ValueError unless it covers this answer.

    Args:
        answer: as it arrived; decoded, it is `delta`.
        sent: this peer's part, to which `delta` is added.
        previous: digest of the previous part, empty for the first.
    """
    try:
        if len(statement) > MAX_STATEMENT_BYTES:
            raise ValueError("too long")
        signed, content = MSGPackSerializer.loads(statement)
        before, hashes, packed = content
        receipt, values = Receipt.parse(signed), torch.from_numpy(np.frombuffer(packed, "<f4").copy())
        hashed = hash_of(answer) in hashes
        expected = sampled(sent + delta, hashes, group, part)
    except Exception as error:  # untrusted bytes may raise anything
        raise ValueError(f"a malformed statement: {error}") from None
    if receipt.reducer != reducer or (receipt.group, receipt.part) != (group, part):
        raise ValueError("a statement of another part, or one that the reducer has not signed")
    if abs(receipt.time - time.time()) > MAX_CLOCK_ERROR_S:
        raise ValueError("a statement of another time")
    if receipt.digest != digest_of(content) or before != previous or not hashed:
        raise ValueError("a statement that does not cover the answer")
    if delta.isfinite().all() and not agrees(values, expected, sent, delta):
        raise ValueError("an answer that is not the signed average")
    return receipt


def agrees(values: Tensor, expected: Tensor, sent: Tensor, delta: Tensor) -> bool:
    """Whether sampled values of an average match those of an answer up to rounding."""
    if not len(expected):
        return not len(values)
    rounding = ROUNDING_DEVIATIONS * float(delta.std(correction=0)) + ROUNDING_LEAST
    rounding += ROUNDING_SHARE * float(sent.norm()) / sent.numel() ** 0.5
    return (
        len(values) == len(expected) and int(((values - expected).abs() <= rounding).logical_not().sum()) <= MAX_MISSES
    )


def sampled(average: Tensor, hashes: list[bytes], group: bytes, part: int) -> Tensor:
    """[SAMPLED] float32 values at positions that the hashes of all answers determine; [0] for an empty part."""
    if not average.numel():
        return torch.zeros(0)
    seed = MSGPackSerializer.dumps([hashes, group, part])
    places = np.frombuffer(shake_256(seed).digest(8 * SAMPLED), "<u8") % average.numel()
    return average.detach().flatten()[torch.from_numpy(places.astype(np.int64))].float()


def hash_of(answer: bytes) -> bytes:
    return sha256(answer).digest()[:HASH_BYTES]


def digest_of(content: list[Any]) -> bytes:
    """Stands in for the content in receipts that are shown to other peers."""
    return sha256(MSGPackSerializer.dumps(content)).digest()


def signed_bytes(group: bytes, time_s: int, part: int, digest: bytes) -> bytes:
    return b"dalle-lean averaged part\n" + bytes(MSGPackSerializer.dumps([group, time_s, part, digest]))
