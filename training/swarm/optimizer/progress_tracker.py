"""How far all peers are together, as each of them counts it."""

import asyncio
import math
from typing import Any

from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, ProgressTracker
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

MAX_BATCHES_PER_STEP = 100
"""No peer gathers this many target batches for one step: such a record is broken."""
DOUBT_S = 600.0
"""How long lone claims are ignored after one that had no state behind it."""
MIN_TRAINER_SAMPLES_PER_S = 1e-3
"""Donors, who do not train, report less."""

Records = dict[Any, LocalTrainingProgress]
"""What peers report, by their keys."""


class SwarmTracker(ProgressTracker):
    """Counts the steps of peers in client mode too, and ignores implausible records.

    hivemind's tracker waits for a listening trainer to go first, and a single record of a faraway step, which anybody
    can write, makes all peers look for the state of that step forever.

    Args:
        last_epoch: the end of the schedule.
        doubtful: ignore all lone claims: for peers without weights, who cannot verify them.
    """

    def __init__(self, *arguments: Any, last_epoch: int, doubtful: bool = False, **options: Any):
        self.last_epoch = last_epoch
        self.doubtful_until = math.inf if doubtful else -math.inf
        self.metadata: Any = None
        """The latest records, as they came."""
        self.trainers = 0
        """Peers that contribute samples, including this one."""
        super().__init__(*arguments, **options)

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        self.metadata = metadata
        records = self.records()
        if get_dht_time() < self.doubtful_until:
            records = without_lone_claims(records, self.local_progress.epoch, self._local_public_key)
        listening = {
            key: ValueWithExpiration({**record.dict(), "client_mode": False}, math.inf)
            for key, record in records.items()
        }
        progress = super()._parse_swarm_progress_data(listening)
        progress.num_clients = sum(record.client_mode for record in records.values())
        self.trainers = sum(record.samples_per_second > MIN_TRAINER_SAMPLES_PER_S for record in records.values())
        return progress

    def records(self) -> Records:
        """The latest plausible records."""
        return plausible_records(
            self.metadata,
            last_epoch=self.last_epoch,
            target_batch_size=self.target_batch_size,
            min_time=get_dht_time() - self.metadata_expiration,
        )

    @property
    def relies_on_lone_claim(self) -> bool:
        """Whether the swarm's step is what one peer alone reports; see `lone_claim`."""
        claim = lone_claim(self.records(), self.local_progress.epoch, self._local_public_key)
        return claim is not None and get_dht_time() >= self.doubtful_until

    def doubt_lone_claims(self) -> int:
        """Ignore lone claims for DOUBT_S; returns the swarm's step without them. Updates must be paused."""
        self.doubtful_until = max(self.doubtful_until, get_dht_time() + DOUBT_S)
        self.global_progress = self._parse_swarm_progress_data(self.metadata)
        return self.global_epoch


class DonorTracker(SwarmTracker):
    """Reports this peer although it has no samples, which hivemind's tracker does not."""

    async def _progress_reporter(self) -> None:
        reported, expires = None, 0.0
        while not self.shutdown_triggered.is_set():
            now = get_dht_time()
            if self.local_progress.epoch != reported or now > expires - self.metadata_expiration / 2:
                reported, expires = self.local_progress.epoch, now + self.metadata_expiration
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


def plausible_records(metadata: Any, *, last_epoch: int, target_batch_size: int, min_time: float) -> Records:
    """The records with the right types and plausible numbers.

    Samples, and samples per second, are capped at `target_batch_size` per peer; the time of a record, in seconds of
    the DHT's clock, is raised to `min_time`.
    """
    records = {}
    for key, entry in metadata.items() if isinstance(metadata, dict) else ():
        try:
            record = LocalTrainingProgress.parse_obj(entry.value)
        except Exception:  # a stranger's record may raise anything
            continue
        finite = math.isfinite(record.samples_per_second) and math.isfinite(record.time)
        max_samples = MAX_BATCHES_PER_STEP * target_batch_size
        if not finite or record.epoch > last_epoch or record.samples_accumulated > max_samples:
            continue
        records[key] = record.copy(
            update={
                "samples_accumulated": min(record.samples_accumulated, target_batch_size),
                "samples_per_second": min(record.samples_per_second, float(target_batch_size)),
                "time": max(record.time, min_time),
            }
        )
    return records


def lone_claim(records: Records, own_epoch: int, own_key: Any) -> Any | None:
    """The key of the one record that is more than a step ahead of all others and of this peer.

    None if there is no such record, or fewer than three peers: of two nobody knows who is right.
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
