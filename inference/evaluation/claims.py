"""Whether something helps, told by the same prompts with and without it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Claim:
    """That something helps, and for how many prompts it did."""

    text: str
    prompts: int
    better: int
    """Prompts of which more is right with it."""
    worse: int
    """Prompts of which more is right without it."""

    @property
    def p_value(self) -> float:
        """How likely so one-sided an outcome is, were both ways equally good."""
        return sign_test(self.better, self.worse)

    @property
    def verdict(self) -> str:
        """ "confirmed", "not confirmed" where it does harm, or "not decided"."""
        if self.p_value >= SIGNIFICANT:
            return "not decided"
        return "confirmed" if self.better > self.worse else "not confirmed"

    def __str__(self) -> str:
        return (
            f"{self.text}: {self.verdict}. Of {self.prompts} prompts {self.better} fared better with it and "
            f"{self.worse} without it (p = {self.p_value:.2g})."
        )

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        return {**vars(self), "p_value": self.p_value, "verdict": self.verdict}


def compare(text: str, with_it: Sequence[float], without: Sequence[float]) -> Claim:
    """How much of each prompt is right with and without, prompt by prompt."""
    pairs = list(zip(with_it, without, strict=True))
    return Claim(text, len(pairs), sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))


def sign_test(more: int, less: int) -> float:
    """Exact two-sided p of so many pairs that differ one way and the other; of right and wrong, McNemar's test."""
    pairs = more + less
    tail = sum(math.comb(pairs, hits) for hits in range(min(more, less) + 1))
    return min(1.0, 2 * tail / 2**pairs)
