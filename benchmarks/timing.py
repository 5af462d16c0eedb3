"""Seconds of work: of a single run, of repeated runs, and of measurements that take turns."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from dalle_lean.terminal import progress_bar

Key = TypeVar("Key")
Result = TypeVar("Result")


class Timed(NamedTuple, Generic[Result]):
    """A result and the time it took."""

    result: Result
    wall_s: float
    cpu_s: float
    """Of all threads of this process; hardly depends on what else the machine does."""


def timed(run: Callable[[], Result]) -> Timed[Result]:
    """Time one run."""
    started, cpu_started = time.perf_counter(), time.process_time()
    result = run()
    return Timed(result, time.perf_counter() - started, time.process_time() - cpu_started)


def now(device: torch.device | str = "cpu") -> float:
    """A clock in seconds, read once the device has done all its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(run: Callable[[], Any], repeats: int, device: torch.device | str = "cpu") -> float:
    """Seconds per run, over `repeats` runs without a pause."""
    started = now(device)
    for _ in range(repeats):
        run()
    return (now(device) - started) / repeats


def in_turns(
    measures: Mapping[Key, Callable[[], Result]], rounds: int, description: str = "Measuring"
) -> dict[Key, list[Result]]:
    """The results of each measurement in each round: A B C A B C ..., so that a busy minute affects all of them."""
    found: dict[Key, list[Result]] = {name: [] for name in measures}
    with progress_bar(description, "measurements") as on_progress:
        for turn in range(rounds):
            for place, (name, measure) in enumerate(measures.items(), start=1):
                found[name].append(measure())
                note = name if isinstance(name, str) else ", ".join(map(str, name))  # type: ignore[call-overload]
                on_progress(turn * len(measures) + place, rounds * len(measures), note)
    return found


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios within each round."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))
