"""Whether something helps, told by the same prompts with and without it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    p_value: float
    """How likely so one-sided an outcome is, were both ways equally good."""

    @property
    def verdict(self) -> str:
        """ "confirmed", "refuted" where it does harm, or "not decided"."""
        if self.p_value >= SIGNIFICANT:
            return "not decided"
        return "confirmed" if self.better > self.worse else "refuted"

    def __str__(self) -> str:
        return (
            f"{self.text}: {self.verdict}. Of {self.prompts} prompts {self.better} fared better with it and "
            f"{self.worse} without it (p = {self.p_value:.2g})."
        )

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        return {**vars(self), "verdict": self.verdict}


def compare(text: str, with_it: Sequence[float], without: Sequence[float]) -> Claim:
    """How much of each prompt is right with and without, prompt by prompt."""
    pairs = list(zip(with_it, without, strict=True))
    better, worse = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    return Claim(text, len(pairs), better, worse, sign_test(better, worse))


def decide_together(claims: Sequence[Claim]) -> list[Claim]:
    """The same claims with p raised so that a single false verdict among all of them is as unlikely as one alone (Holm
    1979, "A simple sequentially rejective multiple test procedure")."""
    p_value, raised = 0.0, {}
    for rank, row in enumerate(sorted(range(len(claims)), key=lambda row: claims[row].p_value)):
        p_value = max(p_value, min(1.0, claims[row].p_value * (len(claims) - rank)))
        raised[row] = p_value
    return [replace(claim, p_value=raised[row]) for row, claim in enumerate(claims)]


def sign_test(more: int, less: int) -> float:
    """Exact two-sided p of so many pairs that differ one way and the other; of right and wrong, McNemar's test."""
    pairs = more + less
    tail = sum(math.comb(pairs, hits) for hits in range(min(more, less) + 1))
    return min(1.0, 2 * tail / 2**pairs)
