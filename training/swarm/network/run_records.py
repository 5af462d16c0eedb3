"""Validation of the records that a run's nodes keep: its own, small and short-lived, written by their owners only."""

from collections.abc import Collection

import hivemind
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from training.swarm.config import SwarmSettings
from training.swarm.host_peers import host_peers
from training.swarm.network.owner_keys import owner_peer
from training.swarm.observe.peer_metrics import record_validators

MAX_VALUE_BYTES = 4096
MAX_AGE_S = 600.0
MAX_OWNERS = 1024  # per key, since identities are free
MAX_ANNOUNCEMENT_BYTES = 64  # of an announcement's peer id, and of its value
AVERAGERS = ("grad_averager", "state_averager")


class RunRecords(RecordValidatorBase):
    """Refuses records of keys that are not the run's, values that are no dictionaries, and too large ones.

    A record's subkey is its owner's public key; hivemind's validator checks its signature. Only hivemind's
    announcements of donors have bare peer ids as subkeys, so anybody can write them, and they must be tiny.

    Args:
        max_age_s: largest lifetime of a record.
    """

    priority = 100
    """Runs before all other validators."""

    def __init__(self, run_id: str, max_age_s: float = MAX_AGE_S):
        self.max_age_s = max_age_s
        owned = [f"{run_id}_{name}" for name in ("progress", "metrics", "waiting")]
        owned += [f"{run_id}_{name}.{kind}" for name in AVERAGERS for kind in ("0b", "complaints")]
        self.owned = set(map(key_of, owned))
        self.announcements = {key_of(f"{run_id}_{name}.all_averagers") for name in AVERAGERS}

    def validate(self, record: DHTRecord) -> bool:
        if not record.expiration_time <= get_dht_time() + self.max_age_s:
            return False
        if record.key in self.announcements:
            fits = max(len(record.value), len(record.subkey)) <= MAX_ANNOUNCEMENT_BYTES
            return fits and record.subkey not in DHTProtocol.RESERVED_SUBKEYS
        if record.key not in self.owned or len(record.value) > MAX_VALUE_BYTES:
            return False
        return owner_of(record.subkey) is not None


class RoomForOwners(RecordValidatorBase):
    """Limits the owners of records under a key.

    Args:
        host: peers whose records are always kept.
    """

    priority = 5
    """Runs after the validator of signatures: a peer that cannot sign for an owner takes up no room."""

    def __init__(self, host: Collection[PeerID] = ()):
        self.host = set(host)
        self.expirations: dict[bytes, dict[bytes, float]] = {}  # by key, then by owner

    def validate(self, record: DHTRecord) -> bool:
        """Whether the key has room for this owner; counts the owner."""
        if owner_of(record.subkey) in self.host:
            return True
        now, known = get_dht_time(), self.expirations.setdefault(record.key, {})
        if record.subkey not in known and len(known) >= MAX_OWNERS:
            for subkey in [subkey for subkey, expiration in known.items() if expiration <= now]:
                del known[subkey]
            if len(known) >= MAX_OWNERS:
                return False
        known[record.subkey] = max(record.expiration_time, known.get(record.subkey, 0.0))
        return True


def key_of(name: str) -> bytes:
    return bytes(DHTID.generate(source=name).to_bytes())


def owner_of(subkey: bytes) -> PeerID | None:
    """The owner of a serialized subkey; None unless it is a public key."""
    try:
        return owner_peer(DHTProtocol.serializer.loads(subkey))
    except Exception:  # untrusted bytes may raise anything
        return None


def keep_own_records(dht: hivemind.DHT, settings: SwarmSettings) -> None:
    """Make this node keep only valid records of the run; needed on every node that others can reach."""
    timing = settings.timing
    max_age_s = max(MAX_AGE_S, timing.progress_expiration_s, timing.matchmaking_time_s)
    own = RunRecords(settings.run_id, max_age_s), RoomForOwners(host_peers(settings.swarm).all)
    dht.add_validators([*own, *record_validators(settings.run_id)])
