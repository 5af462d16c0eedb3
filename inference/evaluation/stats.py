"""Proportions with confidence intervals, and sign tests of what helps on the same prompts."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

SIGNIFICANT = 0.05
Z_95 = 1.96


@dataclass(frozen=True)
class Proportion:
    hits: int
    trials: int

    @classmethod
    def of(cls, outcomes: Sequence[bool]) -> Self:
        """The proportion that is true."""
        return cls(sum(outcomes), len(outcomes))

    @property
    def value(self) -> float:
        """The share of hits, 0..1; nan without trials."""
        return self.hits / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval (Wilson 1927)."""
        if self.trials == 0:
            return 0.0, 1.0
        p, n, z = self.value, self.trials, Z_95
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        if self.trials == 0:
            return "no prompts"
        low, high = self.interval
        return f"{100 * self.value:.0f} % ({self.hits}/{self.trials}; {100 * low:.0f} to {100 * high:.0f})"

    def to_dict(self) -> dict[str, Any]:
        share = self.value if self.trials else None
        return {"share": share, "hits": self.hits, "of": self.trials, "interval_95": list(self.interval)}


@dataclass(frozen=True)
class Comparison:
    """The same prompts with and without something."""

    text: str  # the claim that it helps
    prompts: int
    better: int  # prompts that fare better with it
    worse: int  # prompts that fare better without it
    p_value: float  # two-sided: the probability of so large a difference if both were equally good

    @property
    def verdict(self) -> str:
        """ "confirmed", "refuted" if it does harm, or "not decided"."""
        if self.p_value >= SIGNIFICANT:
            return "not decided"
        return "confirmed" if self.better > self.worse else "refuted"

    def __str__(self) -> str:
        return (
            f"{self.text}: {self.verdict}. Of {self.prompts} prompts {self.better} fared better with it and "
            f"{self.worse} without it (p = {self.p_value:.2g})."
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def compare(text: str, with_it: Sequence[float], without: Sequence[float]) -> Comparison:
    """A sign test of the scores of each prompt with and without it."""
    pairs = list(zip(with_it, without, strict=True))
    better, worse = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    return Comparison(text, len(pairs), better, worse, sign_test(better, worse))


def sign_test(more: int, less: int) -> float:
    """Exact two-sided p of `more` pairs that differ one way and `less` the other; for binary scores, McNemar's test."""
    pairs = more + less
    tail = sum(math.comb(pairs, hits) for hits in range(min(more, less) + 1))
    return min(1.0, 2 * tail / 2**pairs)


def holm(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with p adjusted for their number (Holm 1979, "A simple sequentially rejective multiple test
    procedure"): a false verdict among all is as unlikely as in a single comparison."""
    p_value, adjusted = 0.0, {}
    for rank, row in enumerate(sorted(range(len(comparisons)), key=lambda row: comparisons[row].p_value)):
        p_value = max(p_value, min(1.0, comparisons[row].p_value * (len(comparisons) - rank)))
        adjusted[row] = p_value
    return [replace(comparison, p_value=adjusted[row]) for row, comparison in enumerate(comparisons)]
