"""What a volunteer sees: one line that is brought up to date."""

import math
from dataclasses import dataclass
from pathlib import Path

from dalle_lean.memory.plan_search import human_bytes

FULL, EMPTY = "\u2588", "\u2591"
WIDEST_BAR, NARROWEST_BAR = 30, 6


@dataclass(frozen=True, kw_only=True)
class PeerStatus:
    """Where the swarm is, and what this peer has to do with it.

    Args:
        step, total_steps: of the swarm.
        samples, target: gathered for the next step by all peers, and needed.
        left_s: until the next step, as the swarm expects; nan where nobody knows.
        trainers: peers that bring samples, this one included.
        samples_per_s: of this peer.
        own_samples: that this peer brought since it joined.
        own_share: of all that was brought since then, 0..1.
        loss: of this peer's samples in the last step; nan before.
        solo_steps: that this peer took with its own gradients although others are there.
    """

    step: int = 0
    total_steps: int = 1
    samples: int = 0
    target: int = 1
    left_s: float = math.nan
    trainers: int = 0
    samples_per_s: float = 0.0
    own_samples: int = 0
    own_share: float = 0.0
    loss: float = math.nan
    solo_steps: int = 0

    def line(self, width: int) -> str:
        """All of it, in at most `width` columns; what counts least is left out where it is narrow."""
        share = min(1.0, self.samples / self.target)
        left = "averaging" if share == 1 or self.left_s == 0 else f"{clock(self.left_s)} left"
        left = left if math.isfinite(self.left_s) or share == 1 else "so far"
        head = f"step {self.step}/{self.total_steps}"
        gathered = f"{100 * share:.0f} % {left}"
        trainers = f"{self.trainers} trainer{'s' * (self.trainers != 1)}"
        rate = f"{self.samples_per_s:.3g} samples/s"
        loss = f"loss {self.loss:.3g}" if math.isfinite(self.loss) else ""
        mine = f"mine {100 * self.own_share:.0f} %"
        long = f"gave {self.own_samples:,} samples, {100 * self.own_share:.0f} %"
        alone = f"{self.solo_steps} step{'s' * (self.solo_steps != 1)} alone" if self.solo_steps else ""
        full = [trainers, rate, loss, alone]
        for words in ([*full, long], [*full, mine], [rate, loss, mine], [rate], []):
            tail = "  ".join(filter(None, [gathered, *words]))
            room = width - len(head) - len(tail) - 3
            if room >= NARROWEST_BAR or not words:
                return f"{head} {bar(share, room)} {tail}"[:width]
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Download:
    """How much of the state is here."""

    received: int
    total: int
    seconds: float
    """Since it began."""
    donor: str

    def line(self, width: int) -> str:
        """One line of at most `width` columns."""
        share = min(1.0, self.received / max(1, self.total))
        rate = self.received / self.seconds if self.seconds else 0.0
        left = clock((self.total - self.received) / rate) if rate else "?"
        amount = f"{human_bytes(self.received)} of {human_bytes(self.total)}"
        tail = f"{amount}, {human_bytes(rate)}/s, {left} left, from {self.donor[-8:]}"
        return f"state {bar(share, width - len(tail) - 7)} {tail}"[:width]


def bar(share: float, width: int) -> str:
    """A bar of so many columns."""
    width = max(0, min(width, WIDEST_BAR))
    full = round(share * width)
    return FULL * full + EMPTY * (width - full)


def clock(seconds: float) -> str:
    """0:07, 1:02:03; ? where it is not known."""
    if not 0 <= seconds < 360_000:
        return "?"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(standing: PeerStatus, folder: Path) -> str:
    """What is said at the end."""
    if standing.step >= standing.total_steps:
        return f"the run is finished at step {standing.step}; this machine gave {standing.own_samples:,} samples to it"
    return (
        f"left at step {standing.step} of {standing.total_steps}; this machine gave {standing.own_samples:,} samples. "
        f"The same command goes on from {folder}"
    )
