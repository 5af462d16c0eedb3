"""Many users who send prompt after prompt: how long answers take, and how many are lost, mixed up or refused."""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from demo.service.scheduler import Busy

LONGEST_PAUSE_S = 5.0

Person = Callable[[int], bool]
"""Sends its n-th prompt and returns whether the answer was right; Busy if it was turned away."""


@dataclass
class Load:
    """What became of all prompts."""

    latencies_s: list[float] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """The reasons."""
    mixed_up: int = 0
    busy: int = 0

    def latency_s(self, share: float) -> float | None:
        """The latency that this share of the answers, 0..1, did not exceed; None without answers."""
        return round(float(np.quantile(self.latencies_s, share)), 2) if self.latencies_s else None


def run_crowd(people: Sequence[Person], seconds: float) -> Load:
    """Let everybody ask for `seconds` seconds, and wait for the last answers."""
    load, end_s = Load(), time.monotonic() + seconds
    with ThreadPoolExecutor(len(people)) as threads:
        list(threads.map(lambda person: ask_until(end_s, person, load), people))
    return load


def ask_until(end_s: float, person: Person, load: Load) -> None:
    """Send one person's prompts until the time is up, with a pause after each failure."""
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
        except Exception as error:  # any failure counts as a lost answer
            load.lost.append(f"{type(error).__name__}: {error}")
            time.sleep(1.0)
            continue
        load.ended_s.append(time.monotonic())
        load.latencies_s.append(load.ended_s[-1] - started_s)
        load.mixed_up += not right
