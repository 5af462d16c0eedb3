"""Who makes which part: handed out one by one or in runs, and again where a worker died."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

MAX_DEATHS = 3
MAX_RUN = 16


class WorkersDie(OSError):
    """Workers end again and again without finishing anything."""


def deadly(where: str) -> WorkersDie:
    """The error that tells where MAX_DEATHS workers have died."""
    return WorkersDie(f"{MAX_DEATHS} processes that encode have died {where}; is there enough memory?")


def runs(parts: Sequence[int], workers: int) -> Iterator[list[int]]:
    """Cut into runs of up to MAX_RUN parts, down to single ones, so that all workers end at about the same time."""
    start = 0
    while start < len(parts):
        length = min(MAX_RUN, max(1, (len(parts) - start) // (2 * workers)))
        yield list(parts[start : start + length])
        start += length


class Desk:
    """Hands parts out to workers and takes back what those that died left undone."""

    def __init__(self, parts: Sequence[int]):
        self.waiting = deque(parts)
        self.taken: defaultdict[str, list[int]] = defaultdict(list)
        self.deaths: Counter[int | None] = Counter()

    def next_part(self, worker: str) -> int | None:
        """A part for this worker; None where none is left."""
        if not self.waiting:
            return None
        part = self.waiting.popleft()
        self.taken[worker].append(part)
        return part

    def give_back(self, worker: str, is_finished: Callable[[int], bool]) -> bool:
        """A worker has died: hand its unfinished parts out again. Whether there is work for another worker.

        Raises WorkersDie where the same part, or the start, has ended three workers.
        """
        unfinished = [part for part in self.taken.pop(worker, []) if not is_finished(part)]
        self.waiting.extendleft(reversed(unfinished))
        culprit = unfinished[0] if unfinished else None
        self.deaths[culprit] += 1
        if self.deaths[culprit] == MAX_DEATHS:
            at = "as they start" if culprit is None else f"at part {culprit} of the source"
            raise deadly(at)
        return bool(self.waiting)
