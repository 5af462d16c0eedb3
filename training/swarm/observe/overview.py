"""Summarizes the current state of a run from its peers' records."""

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from training.swarm.averaging.attestation import Credit
from training.swarm.config import SwarmSettings
from training.swarm.observe.peer_metrics import PeerRecord, PeerRecords

PACE_STEPS = 20
MIN_PACE = 1e-9  # steps per second; below it no time left is given
COUNTERS = ("dropped_batches", "dropped_tensors", "skipped_steps", "solo_steps", "resyncs")  # counters of a PeerRecord
MAX_STEPS_BEHIND = 3  # of a record that counts in the loss: a peer that died still has one, until it expires
MAX_FAULTS_PER_STEP = 10  # of each counter of a peer, so that no lie drowns what others report


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The current state of a run; `step` and `total_steps` are the schedule's, losses in nats.

    Medians and sums are over the trainers present. `samples_per_s` is measured from the pace of the steps, None before
    two were observed; `reported_samples_per_s` is the peers' claim.
    """

    step: int
    total_steps: int
    host_step: int | None  # the donors', which have the run's state; the trainers' if the run names no donors
    loss: float | None
    heldout_loss: float | None  # as published by the run's donors
    peers: int
    clients: int
    samples_per_s: float | None
    reported_samples_per_s: float
    left_s: float | None
    counters: dict[str, int]  # sums of COUNTERS, `refused_records`, and the helpers' counts of passes and bans

    def metrics(self) -> dict[str, float]:
        """The metrics for the logs."""
        names = ("loss", "heldout_loss", "peers", "clients", "samples_per_s", "reported_samples_per_s")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**known, **self.counters}


class StepPace:
    """Steps per second over the latest PACE_STEPS observed steps."""

    def __init__(self) -> None:
        self.observed: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)

    def observe(self, step: int, now_s: float) -> None:
        """Record the run's step; a step backwards resets the pace."""
        if self.observed and step < self.observed[-1][1]:
            self.observed.clear()
        if not self.observed or step > self.observed[-1][1]:
            self.observed.append((now_s, step))

    @property
    def steps_per_s(self) -> float | None:
        """Mean steps per second; None before two steps were observed."""
        if len(self.observed) < 2:
            return None
        (first_s, first), (last_s, last) = self.observed[0], self.observed[-1]
        return (last - first) / (last_s - first_s)


def summarize(
    records: PeerRecords,
    settings: SwarmSettings,
    steps_per_s: float | None,
    credits: Mapping[str, Credit] = MappingProxyType({}),
    admission: Mapping[str, int] = MappingProxyType({}),
) -> Overview | None:
    """Summarize the run; None without trainers. `admission` has the helpers' counts, see `counts_of`.

    Step and loss are medians over the trainers, so a minority cannot change them by false claims. Once helpers have
    averaged gradients of some trainers present, only those count, since identities are free, and each as much as the
    samples averaged: who did less than half of the work cannot change them. Until then the step is at most one past
    the donors'. It is never before that of the run's own donors, and the loss is of trainers near it, so one that did
    most of the work and died holds neither back. Nor can a lie fill the counters.
    """
    by_peer = {peer: record for peer, record in records.by_peer.items() if record.role == "trainer"}
    averaged = [peer for peer in by_peer if peer in credits]
    trainers = [by_peer[peer] for peer in averaged or by_peer]
    weights = [max(1.0, credits[peer].samples) for peer in averaged] or [1.0] * len(trainers)
    if not trainers:
        return None
    donors = [records.by_peer[peer] for peer in settings.swarm.donors if peer in records.by_peer]
    heldout = [record.loss for record in donors if record.role == "donor" and record.loss is not None]
    epoch = int(weighted_median([record.step for record in trainers], weights))
    if not averaged:  # claims of anybody: not beyond what the host's own peers say
        epoch = min(epoch, max((record.step + 1 for record in donors), default=settings.last_epoch))
    epoch = max([epoch, *(record.step for record in donors)])
    step = epoch * settings.steps_per_epoch
    batch_size = settings.recipe.data.batch_size
    known = [(record, weight) for record, weight in zip(trainers, weights, strict=True) if record.loss is not None]
    near = [(record, weight) for record, weight in known if record.step >= epoch - MAX_STEPS_BEHIND]
    losses = [(record.loss, weight) for record, weight in near or known]
    reported = sum(record.samples_per_s for record in trainers)
    pace = steps_per_s or reported / batch_size
    return Overview(
        step=step,
        total_steps=settings.total_steps,
        host_step=host_step(donors, settings, step),
        loss=weighted_median(*zip(*losses, strict=True)) if losses else None,
        heldout_loss=statistics.median_low(heldout) if heldout else None,
        peers=len(trainers),
        clients=sum(record.client_mode for record in trainers),
        samples_per_s=None if steps_per_s is None else steps_per_s * batch_size,
        reported_samples_per_s=reported,
        left_s=max(0, settings.total_steps - step) / pace if pace > MIN_PACE else None,
        counters={
            **{
                name: sum(min(getattr(record, name), MAX_FAULTS_PER_STEP * (epoch + 1)) for record in trainers)
                for name in COUNTERS
            },
            "refused_records": records.refused,
            **admission,
        },
    )


def host_step(donors: Sequence[PeerRecord], settings: SwarmSettings, step: int) -> int | None:
    """The schedule's step that the run's donors have by their records; None without any.

    `step`: of the trainers, which counts if the run names no donors.
    """
    if not settings.swarm.donors:
        return step
    epochs = [min(record.step, settings.last_epoch) for record in donors if record.role == "donor"]
    return max(epochs) * settings.steps_per_epoch if epochs else None


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The least value that, with all below it, has half of the weight."""
    ordered = sorted(zip(values, weights, strict=True))
    below = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(below, below[-1] / 2)][0]


def run_state(overview: Overview | None, last_step: int, total_steps: int, is_answered: Callable[[], bool]) -> str:
    """What a visitor must know first: "finished", "training", "no trainers", or "no answer".

    Args:
        overview: of the trainers there are; None without any.
        last_step: the highest that the host is known to have; trainers may be ahead of it.
        is_answered: whether a helper accepts connections; called only if that matters.
    """
    if last_step >= total_steps:
        return "finished"
    if overview is not None:
        return "training"
    return "no trainers" if is_answered() else "no answer"
