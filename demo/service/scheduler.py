"""Users who share one machine: who is served, who waits, and whose turn it is.

Two jobs at once on one processor are slower than one after the other, so those being served take short turns. All run
on one thread, because torch keeps caches and memory for each thread that computes.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


class Busy(Exception):
    """The queue is full."""

    def __init__(self, served: int, waiting: int, seconds: float):
        super().__init__(f"{served} being served, {waiting} waiting")
        self.served, self.waiting = served, waiting
        self.seconds = seconds  # estimated, until there is room again


class Ticket:
    """A place in the order of arrival: the first few are served, the others wait."""

    def __init__(self, scheduler: "Scheduler", left_s: float):
        self.scheduler = scheduler
        self.left_s = left_s  # estimated seconds of work left, without waiting; the holder keeps it up to date

    @property
    def line(self) -> int:
        """Place in the queue, from 1; 0 while being served."""
        with self.scheduler.changed:
            return max(0, self.scheduler.tickets.index(self) - self.scheduler.at_once + 1)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is served; False after `timeout_s`."""
        scheduler = self.scheduler
        with scheduler.changed:
            return scheduler.changed.wait_for(lambda: scheduler.tickets.index(self) < scheduler.at_once, timeout_s)

    def forecast(self) -> tuple[float, float]:
        """Seconds until it is served and until its work is done, if all others keep their places."""
        with self.scheduler.changed:
            return self.scheduler.forecast()[self.scheduler.tickets.index(self)]


class Scheduler:
    """Serves `at_once` tickets, keeps `waiting` more in its queue and turns others away."""

    def __init__(self, at_once: int = 3, waiting: int = 20):
        self.at_once, self.waiting = at_once, waiting
        self.changed = threading.Condition()
        self.tickets: list[Ticket] = []  # in the order of arrival; guarded by `changed`
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="turns")

    def __len__(self) -> int:
        return len(self.tickets)

    @property
    def served(self) -> int:
        """How many tickets are being served."""
        return min(len(self.tickets), self.at_once)

    @contextmanager
    def ticket(self, left_s: float = 0.0) -> Iterator[Ticket]:
        """A ticket, held until the block ends; Busy if the queue is full."""
        ticket = Ticket(self, left_s)
        with self.changed:
            if len(self.tickets) >= self.at_once + self.waiting:
                raise Busy(self.at_once, self.waiting, min(end for _, end in self.forecast()))
            self.tickets.append(ticket)
        try:
            yield ticket
        finally:
            with self.changed:
                self.tickets.remove(ticket)
                self.changed.notify_all()

    def run(self, job: Callable[[], Result]) -> Result:
        """Run a short job in its turn, first come, first served; returns or raises what the job does."""
        return self._worker.submit(job).result()

    def forecast(self) -> list[tuple[float, float]]:
        """`Ticket.forecast` of all tickets."""
        return forecast([ticket.left_s for ticket in self.tickets], self.at_once)


def forecast(left_s: Sequence[float], at_once: int) -> list[tuple[float, float]]:
    """When each of several jobs starts and ends, in seconds from now.

    Args:
        left_s: seconds of work left in each, in the order of arrival.
        at_once: how many share the machine evenly; the next one starts when one of them ends.
    """
    left, now = dict(enumerate(left_s)), 0.0
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    while left:
        served = list(left)[:at_once]
        for job in served:
            starts.setdefault(job, now)
        first = min(served, key=left.__getitem__)
        step = left[first]
        now += step * len(served)
        for job in served:
            left[job] -= step
        ends[first] = now
        del left[first]
    return [(starts[job], ends[job]) for job in range(len(left_s))]
