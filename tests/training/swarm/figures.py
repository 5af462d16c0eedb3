"""Measurements of a test's swarm, as lines of JSON: how far members are apart, and what a dead one lost."""

import json
from collections.abc import Sequence

import numpy as np

from tests.training.swarm.harness import Member, wait_for

AGREEMENT = 1e-3
"""Largest difference of a parameter with 16 bits on the wire; a step changes some ten times as much."""


def difference_at(members: Sequence[Member], step: int) -> float:
    """The largest difference of a parameter between two members after a step."""
    values = np.stack([member.parameters(step) for member in members])
    return float((values.max(axis=0) - values.min(axis=0)).max())


def greatest_difference(members: Sequence[Member]) -> tuple[int, float]:
    """The last step after which all saved their parameters, and the largest difference of a parameter."""
    step = max(set.intersection(*(member.steps_kept() for member in members)))
    return step, difference_at(members, step)


def agreement(
    members: Sequence[Member], since: float, limit: float = AGREEMENT, timeout_s: float = 120.0
) -> dict[str, object]:
    """Wait until all agree after a step that they took since that time; AssertionError if they never do.

    On a crowded machine a round of averaging may fall apart into two groups, whose members agree again when they next
    meet: how many steps that took is told.
    """
    found: dict[int, float] = {}

    def kept_at(member: Member) -> dict[int, float]:
        return {e["parameters_of"]: e["time"] for e in member.events("step") if e["time"] > since}

    def agreed() -> bool:
        fresh = set.intersection(*(set(kept_at(member)) for member in members))
        for step in sorted(fresh - set(found)):
            found[step] = difference_at(members, step)
        return any(apart <= limit for apart in found.values())

    try:
        wait_for(agreed, timeout_s, f"parameters that differ by at most {limit}")
    except AssertionError as error:
        raise AssertionError(f"{error}; they differed by {found}, by step") from None
    first = next(step for step in sorted(found) if found[step] <= limit)
    seconds = max(kept_at(member)[first] for member in members) - since
    return {
        "agree_after_s": round(seconds, 1),
        "steps_apart": first - min(found),
        "greatest_difference": found[first],
        "differences": list(found.values()),
    }


def samples_since_step(member: Member) -> int:
    """Samples that a dead member had computed since its last step with the others."""
    steps, everything = member.events("step"), [*member.events("step"), *member.events("batch")]
    before = steps[-1]["samples"] if steps else 0
    return max((event["samples"] for event in everything), default=0) - before


def tell_figures(fault: str, **figures: object) -> None:
    """One JSON line for BENCHMARKS.md; `pytest -s` shows it."""
    print(json.dumps({"fault": fault, **figures}))
