"""Metrics that peers publish as signed DHT records, which anybody can read and only their owner can write.

A record is signed with the key of the peer's identity file, so its public key gives the peer id, also after restarts.
The content is the peer's own claim: only its form and its owner are checked.
"""

import asyncio
import logging
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import hivemind
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.schema import BytesWithPublicKey, SchemaValidator
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import CompositeValidator, DHTRecord, RecordValidatorBase
from hivemind.utils import get_dht_time
from pydantic.v1 import BaseModel, ConstrainedFloat, ConstrainedInt, ConstrainedStr, StrictBool

from dalle_lean.errors import UserError
from training.swarm.network.owner_keys import owner_key, owner_peer

EXPIRATION_S = 90.0  # a peer without a newer record after this time has left
MAX_CLOCK_ERROR_S = 30.0
MAX_PEERS = 4096  # per run, since identities are free
READ_TIMEOUT_S = 60.0
PUBLISH_INTERVAL_S = 30.0
STORE_TIMEOUT_S = 20.0
LEAVE_TIMEOUT_S = 3.0  # to say that this peer leaves, which its user waits for


class Count(ConstrainedInt):
    strict, ge, le = True, 0, 2**53


class Measure(ConstrainedFloat):
    """Finite: infinity exceeds the limit, and nan fails every comparison."""

    strict, ge, le = True, 0.0, 1e15


class UserName(ConstrainedStr):
    """1 to 32 letters, digits, spaces and ". _ ' -", which no terminal or web page interprets."""

    strict, regex = True, r"^[\w .'-]{1,32}\Z"


def check_user_name(user: str) -> None:
    """ValueError unless it is a UserName."""
    if not re.match(UserName.regex, user):
        raise UserError(f"user name {user!r}: must be 1 to 32 letters, digits, spaces and . _ ' -")


class Version(ConstrainedStr):
    strict, regex = True, r"^[0-9A-Za-z.+-]{1,32}\Z"


class PeerRecord(BaseModel):
    """The published record of a peer: its PeerMetrics and who it is.

    `step` counts steps of the swarm; `loss` is in nats, None before the first step. `samples` and the counters start at
    `started`; the record was written at `time`. Both are in seconds of the DHT's clock. The `role` of a trainer that
    has left is "left".
    """

    step: Count
    loss: Measure | None
    samples: Count
    samples_per_s: Measure
    role: Literal["trainer", "donor", "helper", "left"]
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


@dataclass
class PeerMetrics:
    """The metrics of a peer since it started."""

    epoch: int = 0  # steps of the swarm so far
    loss: float = math.nan  # mean over this peer's samples since the previous step, in nats
    samples: int = 0
    samples_per_s: float = 0.0
    dropped_batches: int = 0  # batches whose loss or gradient was not finite
    dropped_tensors: int = 0  # averages from others that were not finite, or not plausible
    skipped_steps: int = 0  # steps whose averaged gradient was not finite
    solo_steps: int = 0  # steps taken with this peer's gradients alone although others are there
    resyncs: int = 0  # downloads of the state

    def record_fields(self) -> dict[str, Any]:
        """The metrics as fields of a PeerRecord."""
        shared = {name: value for name, value in vars(self).items() if name in PeerRecord.__fields__}
        loss, speed = float(self.loss), float(self.samples_per_s)
        known = Measure.ge <= loss <= Measure.le
        return {**shared, "step": self.epoch, "loss": loss if known else None, "samples_per_s": speed}


class MetricsSchema(BaseModel):
    metrics: dict[BytesWithPublicKey, PeerRecord]


@dataclass(frozen=True)
class PeerRecords:
    """Valid records by peer id, and the number of invalid ones."""

    by_peer: dict[str, PeerRecord]
    refused: int

    def present(self, peer: str) -> PeerRecord | None:
        """The record of a peer; None if it has none or has left."""
        record = self.by_peer.get(peer)
        return None if record is None or record.role == "left" else record


def metrics_key(run_id: str) -> str:
    return f"{run_id}_metrics"


class Publisher:
    """Publishes this peer's metrics at each step of the swarm and at least every PUBLISH_INTERVAL_S, on a thread.

    Args:
        user: display name on the leaderboard, a UserName.
    """

    def __init__(self, dht: hivemind.DHT, run_id: str, *, user: str | None = None, role: str = "trainer"):
        self.dht, self.key, self.subkey = dht, metrics_key(run_id), owner_key(dht)
        self.constant = {
            "role": role,
            "client_mode": dht.client_mode,
            "version": version("dalle-lean"),
            "user": user,
            "started": float(get_dht_time()),
        }
        self.latest: dict[str, Any] | None = None
        self.published = 0
        self.due, self.closed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.keep_publishing, name="metrics", daemon=True)

    def publish(self, metrics: PeerMetrics) -> None:
        """Take the metrics, which the thread publishes upon a new step or after PUBLISH_INTERVAL_S; does not block."""
        before, self.latest = self.latest, {**self.constant, **metrics.record_fields()}
        if before is None:
            self.thread.start()
        if before is None or before["step"] != self.latest["step"]:
            self.due.set()

    def keep_publishing(self) -> None:
        while not self.closed.is_set():
            self.due.wait(PUBLISH_INTERVAL_S)
            self.due.clear()
            if not self.closed.is_set():
                self.store()

    def store(self, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Store one record in the DHT."""
        now = get_dht_time()
        stored, reason = False, "no node took it"
        try:
            content = PeerRecord(**{**(self.latest or {}), "time": float(now)}).dict()
            future = self.dht.store(self.key, content, now + EXPIRATION_S, subkey=self.subkey, return_future=True)
            stored = future.result(timeout=timeout_s)
        except Exception as error:  # of any kind: training goes on without metrics
            reason = f"{type(error).__name__}: {error}"
        if stored:
            self.published += 1
        else:
            logging.getLogger("hivemind").warning(f"the metrics were not published: {reason}")

    def close(self, *, has_left: bool = False) -> None:
        """Stop publishing; call it before the DHT is shut down.

        Args:
            has_left: replace the record by one that says so; else it counts until it expires, as that of a peer that
                has done the last step should.
        """
        self.closed.set()
        self.due.set()
        if self.thread.is_alive():
            self.thread.join(timeout=STORE_TIMEOUT_S)
        if has_left and self.latest is not None:
            self.latest = {**self.latest, "role": "left"}
            self.store(LEAVE_TIMEOUT_S)


def record_validators(run_id: str) -> list[RecordValidatorBase]:
    """Validators that refuse metrics records that are malformed or not signed by their owner."""
    return [SchemaValidator(MetricsSchema, prefix=run_id), RSASignatureValidator()]


def read_records(dht: hivemind.DHT, run_id: str) -> PeerRecords:
    """The current records that are well-formed and signed by their owners; counts the others.

    Asks every node that may store them, so that none can hide records.
    """
    future = dht.run_coroutine(partial(collect, run_id=run_id), return_future=True)
    found, refused = future.result(timeout=READ_TIMEOUT_S)
    return PeerRecords({str(owner_peer(owner)): PeerRecord(**content) for owner, content in found.items()}, refused)


async def collect(_dht: hivemind.DHT, node: DHTNode, run_id: str) -> tuple[dict[bytes, dict[str, Any]], int]:
    """Runs in the node's process; returns the newest valid content by owner, and the number of invalid records."""
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
            refused.add((record.subkey, repr(record.value)))  # any type, as its peer likes
        elif owner not in newest or record.expiration_time > newest[owner][0]:
            newest[owner] = (record.expiration_time, content)
    return {owner: content for owner, (_, content) in newest.items()}, len(refused)


def records_of(key: DHTID, answers: list[Any]) -> Iterator[DHTRecord]:
    """All records in the answers; an answer that is no dictionary counts as one unsigned record."""
    for answer in answers:
        if answer is None:
            continue
        if not isinstance(answer.value, DictionaryDHTValue):
            yield DHTRecord(key.to_bytes(), b"", bytes(answer.value), answer.expiration_time)
            continue
        for subkey, (value, expiration_time) in answer.value.items():
            yield DHTRecord(key.to_bytes(), DHTProtocol.serializer.dumps(subkey), value, expiration_time)


def checked(record: DHTRecord, checks: CompositeValidator) -> tuple[bytes | None, dict[str, Any]]:
    """The record's owner and content; no owner if it is invalid."""
    max_expiration = float(get_dht_time()) + EXPIRATION_S + MAX_CLOCK_ERROR_S  # else a dead peer could seem alive
    try:
        if not checks.validate(record) or record.expiration_time > max_expiration:
            return None, {}
        owner: bytes = DHTProtocol.serializer.loads(record.subkey)
        content: dict[str, Any] = DHTProtocol.serializer.loads(checks.strip_value(record))
        return (None, {}) if owner_peer(owner) is None else (owner, content)
    except Exception:  # untrusted bytes may raise anything
        return None, {}
