"""Which records the nodes of a run keep: the run's own, small and short-lived, each written by its owner alone."""

from collections.abc import Collection

import hivemind
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from training.swarm.config import SwarmSettings
from training.swarm.host_peers import host_peers, owner_peer

MAX_VALUE_BYTES = 4096
MAX_AGE_S = 600.0
MAX_OWNERS = 1024
"""Of the records under one key: identities cost nothing."""
MAX_ANNOUNCEMENT_BYTES = 64
"""Of a peer id, and of what is said under it."""
AVERAGERS = ("grad_averager", "state_averager")


class RunRecords(RecordValidatorBase):
    """Refuses records of other keys than the run's, plain values in place of a dictionary, and what is too much.

    Under all keys but one, records belong to the owner of a public key; a signature is checked elsewhere. hivemind
    announces who hands out states under bare peer ids, so these may be anybody's, and are tiny.

    Args:
        host: peers whose records always have room.
        max_age_s: how long a record may last.
    """

    priority = 100
    """Before anything else looks into a record."""

    def __init__(self, run_id: str, host: Collection[PeerID] = (), max_age_s: float = MAX_AGE_S):
        self.host, self.max_age_s = set(host), max_age_s
        owned = [f"{run_id}_{name}" for name in ("progress", "metrics", "waiting")]
        owned += [f"{run_id}_{name}.{kind}" for name in AVERAGERS for kind in ("0b", "complaints")]
        self.owned = set(map(key_of, owned))
        self.announcements = {key_of(f"{run_id}_{name}.all_averagers") for name in AVERAGERS}
        self.expirations: dict[bytes, dict[bytes, float]] = {}
        """By key and owner."""

    def validate(self, record: DHTRecord) -> bool:
        if not record.expiration_time <= get_dht_time() + self.max_age_s:
            return False
        if record.key in self.announcements:
            fits = max(len(record.value), len(record.subkey)) <= MAX_ANNOUNCEMENT_BYTES
            return fits and record.subkey not in DHTProtocol.RESERVED_SUBKEYS and self.has_room(record)
        if record.key not in self.owned or len(record.value) > MAX_VALUE_BYTES:
            return False
        owner = owner_of(record.subkey)
        return owner is not None and (owner in self.host or self.has_room(record))

    def has_room(self, record: DHTRecord) -> bool:
        """Whether the key has room for one more owner; counts it."""
        now, known = get_dht_time(), self.expirations.setdefault(record.key, {})
        if record.subkey not in known and len(known) >= MAX_OWNERS:
            for subkey in [subkey for subkey, expiration in known.items() if expiration <= now]:
                del known[subkey]
            if len(known) >= MAX_OWNERS:
                return False
        known[record.subkey] = max(record.expiration_time, known.get(record.subkey, 0.0))
        return True

    def merge_with(self, other: RecordValidatorBase) -> bool:
        if not isinstance(other, RunRecords):
            return False
        self.host |= other.host
        self.owned |= other.owned
        self.announcements |= other.announcements
        self.max_age_s = max(self.max_age_s, other.max_age_s)
        return True


def key_of(name: str) -> bytes:
    """How the DHT stores a key."""
    return bytes(DHTID.generate(source=name).to_bytes())


def owner_of(subkey: bytes) -> PeerID | None:
    """The owner of a serialized subkey that is a public key and nothing else."""
    try:
        return owner_peer(DHTProtocol.serializer.loads(subkey))
    except Exception:  # a stranger's bytes may raise anything
        return None


def keep_own_records(dht: hivemind.DHT, settings: SwarmSettings) -> None:
    """Make this node keep nothing but records of the run; needed on every node that others can reach."""
    timing = settings.timing
    max_age_s = max(MAX_AGE_S, timing.progress_expiration_s, timing.matchmaking_time_s)
    dht.add_validators([RunRecords(settings.run_id, host_peers(settings.swarm).all, max_age_s)])
