"""What a peer tells the run of itself: signed records in the DHT, that everybody can read and only their owner write.

A record is signed with the key of the peer's identity file, so its peer id follows from the signature's public key and
outlives restarts. What it says is the peer's own word: only its form and its owner are checked.
"""

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import hivemind
import multihash
from cryptography.hazmat.primitives import hashes, serialization
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from pydantic.v1 import BaseModel, ConstrainedFloat, ConstrainedInt, ConstrainedStr, StrictBool

from dalle_lean.errors import UserError

if TYPE_CHECKING:
    from training.swarm.peer.trainer import Contribution

INTERVAL_S = 30.0
EXPIRATION_S = 90.0
"""A peer that says nothing for so long is gone."""
MAX_CLOCK_ERROR_S = 30.0
MAX_PEERS = 4096
"""Of one run; anybody can make up identities."""
STORE_TIMEOUT_S = 20.0
OWNER = re.compile(rb"\[owner:(ssh-rsa [A-Za-z0-9+/=]{100,2000})\]")


class Count(ConstrainedInt):
    strict, ge, le = True, 0, 2**53


class Measure(ConstrainedFloat):
    """Finite, for infinity is above the limit and nan is nowhere."""

    strict, ge, le = True, 0.0, 1e15


class UserName(ConstrainedStr):
    """1 to 32 letters, digits, spaces and ". _ ' -": nothing that a terminal or a page would obey."""

    strict, regex = True, r"^[\w .'-]{1,32}\Z"


def check_user_name(user: str) -> None:
    """ValueError unless it can be shown."""
    if not re.match(UserName.regex, user):
        raise UserError(f"user name {user!r}: must be 1 to 32 letters, digits, spaces and . _ ' -")


class Version(ConstrainedStr):
    strict, regex = True, r"^[0-9A-Za-z.+-]{1,32}\Z"


class OwnerKey(BytesWithPublicKey):
    """The public key of a record's owner and nothing beside it: one record for each."""

    @classmethod
    def __get_validators__(cls) -> Iterator[Any]:
        yield from super().__get_validators__()
        yield cls.check_alone

    @classmethod
    def check_alone(cls, value: bytes) -> bytes:
        if not OWNER.fullmatch(value):
            raise ValueError("must be a public key")
        return value


class PeerRecord(BaseModel):
    """What one peer says of itself.

    `loss` is in nats, None before the first step; `samples` and the counts are since `started`, `time` is of the
    record, both in seconds of the swarm's clock.
    """

    step: Count
    loss: Measure | None
    samples: Count
    samples_per_s: Measure
    role: Literal["trainer", "donor", "helper"]
    client_mode: StrictBool
    dropped_batches: Count
    dropped_tensors: Count
    skipped_steps: Count
    solo_steps: Count
    resyncs: Count
    version: Version
    user: UserName | None
    started: Measure
    time: Measure


class MetricsSchema(BaseModel):
    metrics: dict[OwnerKey, PeerRecord]


@dataclass(frozen=True)
class PeerRecords:
    """What was found: by peer id; and how many records were not believed."""

    by_peer: dict[str, PeerRecord]
    refused: int


class IdentityKey(RSAPrivateKey):
    """The key of a node's identity file, as hivemind writes it."""

    def __init__(self, identity: Path):
        saved = crypto_pb2.PrivateKey.FromString(identity.read_bytes())
        self._private_key = serialization.load_der_private_key(saved.data, password=None)


class IdentitySigner(RecordValidatorBase):
    """Signs what this node stores under its identity's public key; hivemind's RSASignatureValidator, which a node has
    one of, signs with another key, and checks both."""

    priority = RSASignatureValidator.priority

    def __init__(self, key: RSAPrivateKey):
        self.inner = RSASignatureValidator(key)

    def sign_value(self, record: DHTRecord) -> bytes:
        signed: bytes = self.inner.sign_value(record)
        return signed

    def validate(self, record: DHTRecord) -> bool:
        return True


def metrics_key(run_id: str) -> str:
    """Where in the DHT the records of a run are."""
    return f"{run_id}_metrics"


def record_validators(run_id: str) -> list[RecordValidatorBase]:
    """What a run's records must pass."""
    return [SchemaValidator(MetricsSchema, prefix=run_id), RSASignatureValidator()]


def protect_records(dht: hivemind.DHT, run_id: str) -> None:
    """Have this node store no record of the run that is malformed or not signed by its owner.

    Every node that others can reach must be asked for this: it may be the one to keep the records.
    """
    dht.add_validators(record_validators(run_id))


class Publisher:
    """Tells the others what this peer has done, at each step of the swarm and at least every `interval_s`.

    It is what Peer's `on_step` takes. Everything slow happens on a thread of its own.

    Args:
        identity: the file that `dht` was opened with.
        user: a name for the board of contributions; ValueError where it is not one (see UserName).
    """

    def __init__(
        self,
        dht: hivemind.DHT,
        run_id: str,
        *,
        identity: Path,
        user: str | None = None,
        role: str = "trainer",
        interval_s: float = INTERVAL_S,
    ):
        if user is not None:
            check_user_name(user)
        self.dht, self.key, self.interval_s = dht, metrics_key(run_id), interval_s
        signer = IdentitySigner(IdentityKey(identity))
        self.subkey: bytes = signer.inner.local_public_key
        dht.add_validators([*record_validators(run_id), signer])
        self.constant = {
            "role": role,
            "client_mode": dht.client_mode,
            "version": version("dalle-lean"),
            "user": user,
            "started": float(get_dht_time()),
        }
        self.latest: dict[str, Any] | None = None
        self.published = 0
        self.failures = 0
        """Records that no other peer took; the next one comes soon."""
        self.due, self.closed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.keep_publishing, name="metrics", daemon=True)

    def __call__(self, peer: object, contribution: "Contribution") -> None:
        self.publish(contribution)

    def publish(self, contribution: "Contribution") -> None:
        """Take note of the numbers; returns at once. They go out when the step is a new one or it is time."""
        before, self.latest = self.latest, {**self.constant, **numbers(contribution)}
        if before is None:
            self.thread.start()
        if before is None or before["step"] != self.latest["step"]:
            self.due.set()

    def keep_publishing(self) -> None:
        while not self.closed.is_set():
            self.due.wait(self.interval_s)
            self.due.clear()
            if not self.closed.is_set():
                self.store()

    def store(self) -> None:
        """One record, to those who keep it."""
        now = get_dht_time()
        try:
            content = PeerRecord(**{**(self.latest or {}), "time": float(now)}).dict()
            future = self.dht.store(self.key, content, now + EXPIRATION_S, subkey=self.subkey, return_future=True)
            stored = future.result(timeout=STORE_TIMEOUT_S)
        except Exception:  # of many kinds, and training goes on without metrics; it is counted
            stored = False
        if stored:
            self.published += 1
        else:
            self.failures += 1

    def close(self) -> None:
        """Publish no more; call it before the DHT is shut down."""
        self.closed.set()
        self.due.set()
        if self.thread.is_alive():
            self.thread.join(timeout=STORE_TIMEOUT_S)


def numbers(contribution: "Contribution") -> dict[str, Any]:
    """A contribution in a record's fields; a loss that is not there yet is None."""
    loss = float(contribution.loss)
    return {
        "step": contribution.epoch,
        "loss": loss if Measure.ge <= loss <= Measure.le else None,
        "samples": contribution.samples,
        "samples_per_s": float(contribution.samples_per_s),
        "dropped_batches": contribution.dropped_batches,
        "dropped_tensors": contribution.dropped_tensors,
        "skipped_steps": contribution.skipped_steps,
        "solo_steps": contribution.solo_steps,
        "resyncs": contribution.resyncs,
    }


def peer_id_of(owner: bytes) -> str:
    """The peer id that belongs to a record's subkey (github.com/libp2p/specs, peer-ids)."""
    match = OWNER.fullmatch(owner)
    if match is None:
        raise ValueError("a record's owner must be a public key")
    key = serialization.load_ssh_public_key(match[1])
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=encoded).SerializeToString())
    peer_id: str = PeerID(multihash.encode(digest.finalize(), "sha2-256")).to_base58()
    return peer_id


def read_records(dht: hivemind.DHT, run_id: str, timeout_s: float = 60.0) -> PeerRecords:
    """The records that are well-formed, signed by their owners and not out of date; the others are counted.

    Each node that may keep them is asked, so one that keeps bad ones, or answers with forgeries, hides nothing.
    """
    future = dht.run_coroutine(partial(collect, run_id=run_id), return_future=True)
    found, refused = future.result(timeout=timeout_s)
    return PeerRecords({peer_id_of(owner): PeerRecord(**content) for owner, content in found.items()}, refused)


async def collect(_dht: hivemind.DHT, node: DHTNode, run_id: str) -> tuple[dict[bytes, dict[str, Any]], int]:
    """In the node's process: the newest valid content by owner, and how many records were refused."""
    key = DHTID.generate(source=metrics_key(run_id))
    checks = CompositeValidator(record_validators(run_id))
    nearest = await node.find_nearest_nodes([key], k_nearest=2 * node.num_replicas, exclude_self=True)
    responses = await asyncio.gather(*(node.protocol.call_find(peer, [key]) for peer in nearest[key].values()))
    answers = [node.protocol.storage.get(key), *(response[key][0] for response in responses if response)]

    newest: dict[bytes, tuple[float, dict[str, Any]]] = {}
    refused = set()
    for record in records_of(key, answers):
        if record.expiration_time <= get_dht_time():
            continue
        owner, content = checked(record, checks)
        if owner is None or (owner not in newest and len(newest) >= MAX_PEERS):
            refused.add((record.subkey, record.value))
        elif owner not in newest or record.expiration_time > newest[owner][0]:
            newest[owner] = (record.expiration_time, content)
    return {owner: content for owner, (_, content) in newest.items()}, len(refused)


def records_of(key: DHTID, answers: list[Any]) -> Iterator[DHTRecord]:
    """One by one; anything else than a dictionary of records counts as one record that nobody has signed."""
    for answer in answers:
        if answer is None:
            continue
        if not isinstance(answer.value, DictionaryDHTValue):
            yield DHTRecord(key.to_bytes(), b"", bytes(answer.value), answer.expiration_time)
            continue
        for subkey, (value, expiration_time) in answer.value.items():
            yield DHTRecord(key.to_bytes(), DHTProtocol.serializer.dumps(subkey), value, expiration_time)


def checked(record: DHTRecord, checks: CompositeValidator) -> tuple[bytes | None, dict[str, Any]]:
    """The record's owner and content; no owner where it is not to be believed."""
    try:
        good = checks.validate(record) and record.expiration_time <= time_limit()
        if not good:
            return None, {}
        owner: bytes = DHTProtocol.serializer.loads(record.subkey)
        content: dict[str, Any] = DHTProtocol.serializer.loads(checks.strip_value(record))
        peer_id_of(owner)
    except Exception:  # what a stranger wrote may break any parser
        return None, {}
    return owner, content


def time_limit() -> float:
    """No honest record is valid for longer; a dead peer's would seem alive."""
    return float(get_dht_time()) + EXPIRATION_S + MAX_CLOCK_ERROR_S
