"""Many people who ask again and again: how long their answers took, and what was lost, mixed up or refused."""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from demo.service.scheduler import Busy

LONGEST_PAUSE_S = 5.0

Person = Callable[[int], bool]
"""Asks for the n-th time; whether the answer was right. Busy where it was sent away."""


@dataclass
class Load:
    """What happened to everybody's prompts."""

    latencies_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Why each was."""
    mixed_up: int = 0
    busy: int = 0

    def latency_s(self, share: float) -> float | None:
        """The latency that this share of the answers did not exceed; None without answers."""
        return round(float(np.quantile(self.latencies_s, share)), 2) if self.latencies_s else None


def run_crowd(people: Sequence[Person], seconds: float) -> Load:
    """Everybody at once for so many seconds; what was begun is waited for."""
    load, end_s = Load(), time.monotonic() + seconds
    with ThreadPoolExecutor(len(people)) as threads:
        list(threads.map(lambda person: ask_until(end_s, person, load), people))
    return load


def ask_until(end_s: float, person: Person, load: Load) -> None:
    """One person: prompt after prompt until the time is up, with a pause after one that failed."""
    for number in itertools.count():
        started_s = time.monotonic()
        if started_s >= end_s:
            return
        try:
            right = person(number)
        except Busy as busy:
            load.busy += 1
            time.sleep(min(busy.seconds, LONGEST_PAUSE_S))
            continue
        except Exception as error:  # whatever the reason: the answer is lost, and that is what is counted
            load.lost.append(f"{type(error).__name__}: {error}")
            time.sleep(1.0)
            continue
        load.ended_s.append(time.monotonic())
        load.latencies_s.append(load.ended_s[-1] - started_s)
        load.mixed_up += not right
