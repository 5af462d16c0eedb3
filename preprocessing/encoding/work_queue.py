"""Which worker encodes which part: one by one or in runs, and again after a worker has died."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence

MAX_DEATHS = 3
MAX_RUN = 16


class WorkersDie(OSError):
    """Workers end again and again without finishing anything."""


def too_many_deaths(where: str) -> WorkersDie:
    """The error that tells where MAX_DEATHS workers have died."""
    return WorkersDie(f"{MAX_DEATHS} processes that encode have died {where}; is there enough memory?")


def runs(parts: Sequence[int], workers: int) -> Iterator[list[int]]:
    """Cut into runs of up to MAX_RUN parts, down to single ones, so that all workers end at about the same time."""
    start = 0
    while start < len(parts):
        length = min(MAX_RUN, max(1, (len(parts) - start) // (2 * workers)))
        yield list(parts[start : start + length])
        start += length


class WorkQueue:
    """Parts for workers to take; the unfinished parts of a worker that died are queued again."""

    def __init__(self, parts: Sequence[int]):
        self.waiting = deque(parts)
        self.taken: defaultdict[Hashable, list[int]] = defaultdict(list)
        self.deaths: Counter[int | None] = Counter()

    def next_part(self, worker: Hashable) -> int | None:
        """A part for this worker; None when none is left."""
        if not self.waiting:
            return None
        part = self.waiting.popleft()
        self.taken[worker].append(part)
        return part

    def worker_died(self, worker: Hashable, is_finished: Callable[[int], bool]) -> bool:
        """Queue the unfinished parts of a dead worker again. Returns whether another worker has anything to do.

        Raises WorkersDie when the same part, or the start, has ended three workers.
        """
        unfinished = [part for part in self.taken.pop(worker, []) if not is_finished(part)]
        self.waiting.extendleft(reversed(unfinished))
        culprit = unfinished[0] if unfinished else None
        self.deaths[culprit] += 1
        if self.deaths[culprit] == MAX_DEATHS:
            raise too_many_deaths("as they start" if culprit is None else f"at part {culprit} of the source")
        return bool(self.waiting)
