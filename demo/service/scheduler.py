"""People who share one machine: who is served, who waits, and whose turn it is. Knows nothing of drawing.

Two jobs at once on one processor are slower than one after the other, so those who are served take short turns, all on
one thread: torch keeps caches and memory for each thread that computes.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


class Busy(Exception):
    """The waiting line is full."""

    def __init__(self, served: int, waiting: int, seconds: float):
        super().__init__(f"{served} are served and {waiting} wait")
        self.served, self.waiting = served, waiting
        self.seconds = seconds
        """Until there is room again, as far as can be told."""


class Place:
    """One person's place, in the order of arrival; the first few are served, the others wait."""

    def __init__(self, scheduler: "Scheduler", left_s: float):
        self.scheduler = scheduler
        self.left_s = left_s
        """The work that is left, in seconds of turns of its own; whoever holds the place keeps it up to date."""

    @property
    def line(self) -> int:
        """Place in the waiting line from 1; 0 is being served."""
        return self.scheduler.line_of(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """True as soon as it is served, False when `timeout_s` has passed before."""
        return self.scheduler.wait_for(self, timeout_s)

    def forecast(self) -> tuple[float, float]:
        """Seconds until this place is served and until its work is done, if all others stay."""
        return self.scheduler.forecast_of(self)


class Scheduler:
    """Serves `at_once` people, keeps `waiting` more in line and sends the others away."""

    def __init__(self, at_once: int = 3, waiting: int = 20):
        self.at_once, self.waiting = at_once, waiting
        self._changed = threading.Condition()
        self._places: list[Place] = []  # in the order of arrival; the first `at_once` are served
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="turns")

    def __len__(self) -> int:
        return len(self._places)

    @contextmanager
    def place(self, left_s: float = 0.0) -> Iterator[Place]:
        """A place until the block is left, by whatever way; Busy where the line is full."""
        place = Place(self, left_s)
        with self._changed:
            if len(self._places) >= self.at_once + self.waiting:
                ends = [end for _, end in self._forecast()]
                raise Busy(self.at_once, self.waiting, min(ends))
            self._places.append(place)
        try:
            yield place
        finally:
            with self._changed:
                self._places.remove(place)
                self._changed.notify_all()

    def run(self, job: Callable[[], Result]) -> Result:
        """Do a short job when it is its turn, first come first served, and return what it returns or raises."""
        return self._worker.submit(job).result()

    def line_of(self, place: Place) -> int:
        with self._changed:
            return max(0, self._places.index(place) - self.at_once + 1)

    def wait_for(self, place: Place, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._places.index(place) < self.at_once, timeout_s)

    def forecast_of(self, place: Place) -> tuple[float, float]:
        with self._changed:
            return self._forecast()[self._places.index(place)]

    def _forecast(self) -> list[tuple[float, float]]:
        return forecast([place.left_s for place in self._places], self.at_once)


def forecast(left_s: Sequence[float], at_once: int) -> list[tuple[float, float]]:
    """When each of several jobs starts and ends, in seconds from now.

    Args:
        left_s: the work that is left of each, in the order of arrival.
        at_once: so many share the machine evenly; the next one starts when one of them ends.
    """
    left = dict(enumerate(left_s))
    now = 0.0
    starts = [0.0] * len(left_s)
    ends = [0.0] * len(left_s)
    served = list(left)[:at_once]
    while served:
        first = min(served, key=lambda job: left[job])
        step = left[first]
        now += step * len(served)
        for job in served:
            left[job] -= step
        ends[first] = now
        del left[first]
        for job in list(left)[:at_once]:
            if job not in served:
                starts[job] = now
        served = list(left)[:at_once]
    return list(zip(starts, ends, strict=True))
