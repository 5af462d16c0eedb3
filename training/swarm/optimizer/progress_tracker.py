"""How far all peers are together, as each of them counts it."""

import asyncio
import math
from typing import Any

from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, ProgressTracker
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

MOST_TARGETS = 100
"""So many times the samples of a step no peer has gathered for one: its record is broken."""
DOUBT_S = 600.0
"""So long after a claim that had no state behind it such claims are left out."""

SLOWEST_TRAINER = 1e-3
"""Samples per second; donors, who follow the run without training, report none."""

Records = dict[Any, LocalTrainingProgress]
"""What peers say, by their keys."""


class SwarmTracker(ProgressTracker):
    """Counts the steps of peers in client mode too, and believes no record that cannot be true.

    hivemind's leaves those behind to themselves who wait for a listening trainer to go first, and a single record of a
    step far away, which anybody can write, has all of its peers look for the state of that step for ever.

    Args:
        last_epoch: the schedule has no more steps.
        doubtful: never believe a lone claim: for peers that hold no weights by which it could be proved.
    """

    def __init__(self, *arguments: Any, last_epoch: int, doubtful: bool = False, **options: Any):
        self.last_epoch = last_epoch
        self.doubtful_until = math.inf if doubtful else -math.inf
        self.found: Any = None
        """The records as they came last."""
        self.trainers = 0
        """Those of the peers that bring samples, this one included."""
        super().__init__(*arguments, **options)

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        self.found = metadata
        records = self.read()
        if get_dht_time() < self.doubtful_until:
            records = without_lone_claims(records, self.local_progress.epoch, self._local_public_key)
        listening = {
            key: ValueWithExpiration({**record.dict(), "client_mode": False}, math.inf)
            for key, record in records.items()
        }
        progress = super()._parse_swarm_progress_data(listening)
        progress.num_clients = sum(record.client_mode for record in records.values())
        self.trainers = sum(record.samples_per_second > SLOWEST_TRAINER for record in records.values())
        return progress

    def read(self) -> Records:
        """The records that may be true."""
        return readable(
            self.found,
            last_epoch=self.last_epoch,
            target_batch_size=self.target_batch_size,
            oldest=get_dht_time() - self.metadata_expiration,
        )

    @property
    def rests_on_one(self) -> bool:
        """Whether the swarm is taken to be where one peer alone says; see `lone_claim`."""
        claim = lone_claim(self.read(), self.local_progress.epoch, self._local_public_key)
        return claim is not None and get_dht_time() >= self.doubtful_until

    def doubt(self) -> int:
        """Believe no lone claim for DOUBT_S; returns the swarm's step without them. Updates must be paused."""
        self.doubtful_until = max(self.doubtful_until, get_dht_time() + DOUBT_S)
        self.global_progress = self._parse_swarm_progress_data(self.found)
        return self.global_epoch


def readable(metadata: Any, *, last_epoch: int, target_batch_size: int, oldest: float) -> Records:
    """The records that have the right types and numbers that may be true.

    Samples count for at most `target_batch_size` a peer, and so do samples a second; a record that is older than
    `oldest`, in seconds of the DHT, counts as one of then.
    """
    records = {}
    for key, entry in metadata.items() if isinstance(metadata, dict) else ():
        try:
            record = LocalTrainingProgress.parse_obj(entry.value)
        except Exception:  # of whatever kind, it comes from a stranger
            continue
        finite = math.isfinite(record.samples_per_second) and math.isfinite(record.time)
        if not finite or record.epoch > last_epoch or record.samples_accumulated > MOST_TARGETS * target_batch_size:
            continue
        records[key] = record.copy(
            update={
                "samples_accumulated": min(record.samples_accumulated, target_batch_size),
                "samples_per_second": min(record.samples_per_second, float(target_batch_size)),
                "time": max(record.time, oldest),
            }
        )
    return records


def lone_claim(records: Records, own_epoch: int, own_key: Any) -> Any | None:
    """The key of the one record that is more than a step ahead of all others, this peer's own step among them.

    None where there is no such record, and where there are fewer than three peers: of two nobody knows who is right.
    """
    others = {key: record.epoch for key, record in records.items() if key != own_key}
    if len(others) < 2:
        return None
    first = max(others, key=others.__getitem__)
    rest = [own_epoch, *(epoch for key, epoch in others.items() if key != first)]
    return first if others[first] > max(rest) + 1 else None


def without_lone_claims(records: Records, own_epoch: int, own_key: Any) -> Records:
    """The records up to the step that at least two peers confirm."""
    while (claim := lone_claim(records, own_epoch, own_key)) is not None:
        records = {key: record for key, record in records.items() if key != claim}
    return records


class FollowingTracker(SwarmTracker):
    """Tells the others that this peer is there although it brings no samples: hivemind's own tracker keeps silent."""

    async def _progress_reporter(self) -> None:
        said, expires = None, 0.0
        while not self.shutdown_triggered.is_set():
            now = get_dht_time()
            if self.local_progress.epoch != said or now > expires - self.metadata_expiration / 2:
                said, expires = self.local_progress.epoch, now + self.metadata_expiration
                await self.dht.store(
                    key=self.training_progress_key,
                    subkey=self._local_public_key,
                    value=self.local_progress.copy(update={"time": now}).dict(),
                    expiration_time=expires,
                    return_future=True,
                )
            loop = asyncio.get_event_loop()
            await loop.run_in_executor(None, self.should_report_progress.wait, self.metadata_expiration / 4)
            self.should_report_progress.clear()
