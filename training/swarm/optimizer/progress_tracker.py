"""The swarm's progress, as each peer derives it from the others' records."""

import asyncio
import logging
import math
from collections.abc import Collection
from statistics import median_low
from typing import Any

from hivemind.optim.progress_tracker import GlobalTrainingProgress, LocalTrainingProgress, ProgressTracker
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from training.swarm.network.owner_keys import owner_peer

MAX_BATCHES_PER_STEP = 100
"""No peer gathers this many target batches for one step: such a record is invalid."""
DOUBT_S = 600.0
"""How long lone claims are ignored after one that no state confirmed."""
MIN_TRAINER_SAMPLES_PER_S = 1e-3
"""Donors, which do not train, report less."""
END_KNOWN_S = 540.0
"""How long the record of a donor that left after the last step is kept: nodes keep none for more than 600 s."""
STORE_TIMEOUT_S = 20.0

Records = dict[Any, LocalTrainingProgress]
"""Progress records by their owners' keys."""


class SwarmTracker(ProgressTracker):
    """Tracks peers in client mode too, and ignores implausible records.

    hivemind's tracker lets listening trainers go first, and believes any record. Here a donor's record, which only the
    donor can sign, bounds what is believed: no step more than one ahead of the donor's and this peer's own counts,
    however many peers claim it. While the donor is offline, its last known step is the bound. A peer that has never
    seen a donor's record believes steps that two others confirm.

    Args:
        last_epoch: the end of the schedule.
        donors: of the run.
    """

    counts_itself = True
    """Whether this peer counts as one that takes steps."""

    def __init__(self, *arguments: Any, last_epoch: int, donors: Collection[PeerID] = (), **options: Any):
        self.last_epoch, self.donors = last_epoch, donors
        self.doubtful_until = -math.inf
        self.metadata: Any = None
        """The latest records, unchecked."""
        self.donor_epoch: int | None = None
        """The donors' step, as last seen."""
        self.believed_epoch: float = math.inf
        """The latest step that is believed."""
        self.trainers = 0
        """Peers that contribute samples, including this one."""
        self.others_seen = False
        """Whether other peers were ever there."""
        super().__init__(*arguments, **options)

    def _parse_swarm_progress_data(self, metadata: Any) -> GlobalTrainingProgress:
        self.metadata = metadata
        records = self.records()
        if self.donor_epoch is None and get_dht_time() < self.doubtful_until:
            records = without_lone_claims(records, self.local_progress.epoch, self._local_public_key)
        progress = super()._parse_swarm_progress_data(
            {key: ValueWithExpiration(record, math.inf) for key, record in records.items()}
        )
        self.trainers = sum(map(is_trainer, records.values()))
        self.others_seen |= any(key != self._local_public_key for key in records)
        if self.counts_itself and self._local_public_key not in records:
            progress.num_peers += 1  # its own first record takes a while, but with one other peer there are already two
        return progress

    def records(self) -> Records:
        """The latest records that are plausible and believed."""
        records = self.plausible_records()
        donors = [record.epoch for key, record in records.items() if owner_peer(key) in self.donors]
        return self.believed_records(records, donors)

    def plausible_records(self) -> Records:
        """The latest records with valid types and plausible values, all as of listening peers.

        Samples, and samples per second, are capped at `target_batch_size` per peer; no record counts as older than
        `metadata_expiration`, in seconds.
        """
        max_samples, min_time = MAX_BATCHES_PER_STEP * self.target_batch_size, get_dht_time() - self.metadata_expiration
        records = {}
        for key, entry in self.metadata.items() if isinstance(self.metadata, dict) else ():
            try:
                record = LocalTrainingProgress.parse_obj(entry.value)
            except Exception:  # an untrusted record may raise anything
                continue
            finite = math.isfinite(record.samples_per_second) and math.isfinite(record.time)
            if finite and record.epoch <= self.last_epoch and record.samples_accumulated <= max_samples:
                records[key] = record.copy(
                    update={
                        "samples_accumulated": min(record.samples_accumulated, self.target_batch_size),
                        "samples_per_second": min(record.samples_per_second, float(self.target_batch_size)),
                        "time": max(record.time, min_time),
                        "client_mode": False,
                    }
                )
        return records

    def believed_records(self, records: Records, donors: list[int]) -> Records:
        """The records of believed steps, given the steps that donors report now."""
        self.donor_epoch = max(donors, default=self.donor_epoch)
        if self.donor_epoch is not None:
            self.believed_epoch = max(self.donor_epoch, self.local_progress.epoch) + 1
        return up_to(self.believed_epoch, records)

    @property
    def confirmed_epoch(self) -> int:
        """The donors' step; the swarm's if no donor was ever seen."""
        return int(self.global_epoch if self.donor_epoch is None else self.donor_epoch)

    @property
    def relies_on_lone_claim(self) -> bool:
        """Whether only one peer reports the swarm's step; see `lone_claim`."""
        claim = lone_claim(self.records(), self.local_progress.epoch, self._local_public_key)
        return self.donor_epoch is None and claim is not None and get_dht_time() >= self.doubtful_until

    def doubt_lone_claims(self) -> int:
        """Ignore lone claims for DOUBT_S; returns the swarm's step without them. Updates must be paused."""
        self.doubtful_until = max(self.doubtful_until, get_dht_time() + DOUBT_S)
        self.global_progress = self._parse_swarm_progress_data(self.metadata)
        return self.global_epoch


class DonorTracker(SwarmTracker):
    """The tracker of a donor: untrusted records can at most have it look for a group.

    Unlike hivemind's tracker, it reports this peer although it has no samples.
    """

    trainers_epoch = -1
    """The step that more than half of the trainers report to have reached, believed or not; -1 without trainers."""
    saved_last_step = False
    """Whether the state of the last step is saved."""

    def believed_records(self, records: Records, donors: list[int]) -> Records:
        """If most trainers are further ahead, shows them one step ahead, so that this donor looks for their group."""
        # Its own record from before a restart counts too.
        self.donor_epoch = max([self.donor_epoch or 0, self.local_progress.epoch, *donors])
        self.believed_epoch = self.donor_epoch + 1
        self.trainers_epoch = middle_of_trainers(records, -1)
        if self.trainers_epoch <= self.believed_epoch:
            return up_to(self.believed_epoch, records)
        behind = {"epoch": self.believed_epoch, "samples_accumulated": 0}
        return {
            key: record.copy(update=behind) if record.epoch > self.believed_epoch else record
            for key, record in records.items()
        }

    @property
    def run_is_over(self) -> bool:
        """Whether more than half of the trainers report that they have taken the last step."""
        self.records()
        return self.trainers_epoch >= self.last_epoch

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop. hivemind erases the peer's record; if the run is over, this donor's stays for END_KNOWN_S, as trainers
        that were busy, and newcomers, read there that the last step is done."""
        if not self.saved_last_step:
            super().shutdown(timeout)
            return
        for event in (self.shutdown_triggered, self.should_report_progress, self.global_state_updated):
            event.set()
        self.shutdown_complete.wait(timeout)
        # Nothing may follow: a node drops a record once one that it has refused for expiring earlier would have.
        try:
            self.store_record(END_KNOWN_S).result(timeout=STORE_TIMEOUT_S)
        except TimeoutError:
            logging.getLogger("hivemind").warning("no node took the record that the last step is done")

    def store_record(self, lifetime_s: float) -> Any:
        """Store this donor's progress in the DHT; returns a future."""
        now = get_dht_time()
        record = self.local_progress.copy(update={"time": now}).dict()
        key, subkey, expires = self.training_progress_key, self._local_public_key, now + lifetime_s
        return self.dht.store(key, subkey=subkey, value=record, expiration_time=expires, return_future=True)

    async def _progress_reporter(self) -> None:
        reported, expires = None, 0.0
        while not self.shutdown_triggered.is_set():
            now = get_dht_time()
            if self.local_progress.epoch != reported or now > expires - self.metadata_expiration / 2:
                reported, expires = self.local_progress.epoch, now + self.metadata_expiration
                await self.store_record(self.metadata_expiration)
            loop = asyncio.get_event_loop()
            await loop.run_in_executor(None, self.should_report_progress.wait, self.metadata_expiration / 4)
            self.should_report_progress.clear()


class HelperTracker(SwarmTracker):
    """The tracker of a helper, which has no weights: it follows the donors or, while they are offline, the trainers."""

    counts_itself = False

    def believed_records(self, records: Records, donors: list[int]) -> Records:
        own = self.local_progress.epoch
        self.believed_epoch = max(donors) if donors else middle_of_trainers(records, own)
        # A donor reports its new step some time after the round, in which this helper took part.
        return up_to(own if own == self.believed_epoch + 1 else self.believed_epoch, records)


def is_trainer(record: LocalTrainingProgress) -> bool:
    return bool(record.samples_per_second > MIN_TRAINER_SAMPLES_PER_S)


def middle_of_trainers(records: Records, default: int) -> int:
    """The lower median of the trainers' steps."""
    return median_low([record.epoch for record in records.values() if is_trainer(record)] or [default])


def up_to(epoch: float, records: Records) -> Records:
    return {key: record for key, record in records.items() if record.epoch <= epoch}


def lone_claim(records: Records, own_epoch: int, own_key: Any) -> Any | None:
    """The key of a single record that is more than one step ahead of all others and of this peer.

    None if there is no such record, or if there are fewer than three peers: of two, either may be right.
    """
    others = {key: record.epoch for key, record in records.items() if key != own_key}
    if len(others) < 2:
        return None
    first = max(others, key=others.__getitem__)
    rest = [own_epoch, *(epoch for key, epoch in others.items() if key != first)]
    return first if others[first] > max(rest) + 1 else None


def without_lone_claims(records: Records, own_epoch: int, own_key: Any) -> Records:
    """The records of steps that at least two peers confirm."""
    while (claim := lone_claim(records, own_epoch, own_key)) is not None:
        records = {key: record for key, record in records.items() if key != claim}
    return records
