"""Shares with their confidence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """So many hits of so many tries."""

    hits: int
    of: int

    @property
    def value(self) -> float:
        """0..1; nan of nothing."""
        return self.hits / self.of if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval (Wilson 1927)."""
        return wilson(self.hits, self.of) if self.of else (0.0, 1.0)

    def __str__(self) -> str:
        if self.of == 0:
            return "no prompts"
        low, high = self.interval
        return f"{100 * self.value:.0f} % ({self.hits}/{self.of}; {100 * low:.0f} to {100 * high:.0f})"

    def to_dict(self) -> dict[str, float | list[float] | None]:
        """For a report."""
        return {
            "share": self.value if self.of else None,
            "hits": self.hits,
            "of": self.of,
            "interval_95": list(self.interval),
        }


def share(hits: Sequence[bool]) -> Share:
    """Of those that are true."""
    return Share(sum(hits), len(hits))


def wilson(hits: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share."""
    p = hits / of
    centre = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return max(0.0, centre - half), min(1.0, centre + half)
