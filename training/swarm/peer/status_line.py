"""The status line of a volunteer, during the download and training."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from dalle_lean.words import counted, human_bytes
from training.swarm.observe.peer_metrics import PeerMetrics

FULL, EMPTY = "\u2588", "\u2591"
MAX_BAR_COLUMNS, MIN_BAR_COLUMNS = 30, 6
MAX_ESTIMATE_S = 30 * 86400
"""Longer estimates are none: until a peer has told its speed, hivemind divides by almost 0."""


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """The swarm's progress, and this peer's part in it.

    Args:
        step, total_steps: of the schedule.
        left_s: time until the last step at the pace of the latest ones; nan before two were observed.
        next_step_s: the swarm's estimate of the time until the next step's averaging, 0 during it; infinite if unknown.
        trainers: peers that contribute samples, including this one.
        samples_per_s: of this peer.
        own: this peer's metrics since it joined. Its share of all samples is for those who know what helpers averaged:
            `dalle-lean monitor` and the run's page.
    """

    step: int = 0
    total_steps: int = 1
    left_s: float = math.nan
    next_step_s: float = math.inf
    trainers: int = 0
    samples_per_s: float = 0.0
    own: PeerMetrics = field(default_factory=PeerMetrics)

    def line(self, width: int) -> str:
        """One line of at most `width` columns; a narrow one omits what matters least."""
        head = f"step {self.step}/{self.total_steps}"
        left = f"{clock(self.left_s)} left" if math.isfinite(self.left_s) else ""
        upcoming = f"next step in {clock(self.next_step_s)}" if self.next_step_s < MAX_ESTIMATE_S else ""
        upcoming = "averaging" if self.next_step_s == 0 else upcoming
        trainers = counted(self.trainers, "trainer")
        rate = f"{self.samples_per_s:.3g} samples/s"
        loss = f"loss {self.own.loss:.3g}" if math.isfinite(self.own.loss) else ""
        gave = f"gave {counted(self.own.samples, 'sample')}"
        alone = f"{counted(self.own.solo_steps, 'step')} alone" if self.own.solo_steps else ""
        for words in (
            [left, upcoming, trainers, rate, loss, alone, gave],
            [left, upcoming, rate, loss],
            [left, rate, loss],
            [left, rate],
            [left],
        ):
            tail = "  ".join(filter(None, words))
            room = width - len(head) - len(tail) - 3
            if room >= MIN_BAR_COLUMNS:
                break
        return f"{head} {bar(self.step / self.total_steps, room)} {tail}"[:width]


def download_line(received: int, total: int, donor: str, seconds: float, width: int) -> str:
    """Progress of downloading the state, in bytes, `seconds` after its start; one line of at most `width` columns."""
    share = min(1.0, received / max(1, total))
    rate = received / seconds if seconds else 0.0
    tail = f"{human_bytes(received)} of {human_bytes(total)}"
    tail += f", {human_bytes(rate)}/s" if rate else ""
    tail += f", {clock((total - received) / rate)} left" if rate and share < 1 else ""
    tail += f", from {donor[-8:]}"
    return f"state {bar(share, width - len(tail) - 7)} {tail}"[:width]


def bar(share: float, width: int) -> str:
    width = max(0, min(width, MAX_BAR_COLUMNS))
    full = round(share * width)
    return FULL * full + EMPTY * (width - full)


def clock(seconds: float) -> str:
    """Format as 0:07, 1:02:03 or, from 100 hours on, 5 days; ? if unknown."""
    if not 0 <= seconds < math.inf:
        return "?"
    if seconds >= 360_000:
        return counted(round(seconds / 86400), "day")
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(status: PeerStatus, folder: Path) -> str:
    gave = f"this machine gave {counted(status.own.samples, 'sample')}"
    if status.step >= status.total_steps:
        return f"the run finished at step {status.step}; {gave}"
    return f"left at step {status.step} of {status.total_steps}; {gave}. The same command continues from {folder}"
