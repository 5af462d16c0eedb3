"""Decoding in worker processes: a picture that ends its process, or wants too much memory, is counted, not fatal."""

import os
import resource
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Self, TypeVar

from dalle_lean.images.files import quiet_pillow
from preprocessing.encoding.decoding import Candidate, Decoding, Rejection
from preprocessing.encoding.worker_process import Process
from preprocessing.encoding.worker_protocol import BadAnswer, from_bytes, max_bytes, to_bytes
from preprocessing.sources import Sample

MIN_MEMORY_BYTES = 128 * 2**20
MEMORY_BYTES = 2**30
"""What a worker may take for a picture, beside the 150 MB of an idle one."""
CPU_LIMIT_S = 30.0
"""Processor time for one picture; the largest that are taken need a few seconds."""
TRIES = 3
"""A worker can be killed by others than its picture: only one that ends three workers is to blame."""
WAITING_BYTES = 256 * 2**20
"""Undecoded pictures read ahead."""
GROUP_SIZE = 8
GROUP_BYTES = 2**21
"""Of a group's pictures, and of their pixels; a larger picture is a group of its own."""

READY = b"ready"

Result = Candidate | Rejection
Other = TypeVar("Other")


class DecodeWorker:
    """One worker process. Raises EOFError or OSError where it has died, BadAnswer where it should."""

    def __init__(self, decoding: Decoding, memory_bytes: int, cpu_limit_s: float):
        self.decoding = decoding
        self.process = Process(serve, decoding, memory_bytes, cpu_limit_s)
        self.answered = 0
        self.ready = False

    def ask(self, samples: Sequence[Sample]) -> None:
        """Have these decoded; an `answer` for each is to be taken."""
        connection = self.process.connection
        if not self.ready:
            if connection.recv_bytes(len(READY)) != READY:
                raise BadAnswer("it did not say that it is ready")
            self.ready = True
        connection.send(samples)

    def answer(self, sample: Sample) -> Result:
        """What became of the first sample that is not answered yet."""
        result = from_bytes(self.process.connection.recv_bytes(max_bytes(self.decoding)), sample, self.decoding)
        self.answered += 1
        return result


@dataclass(frozen=True)
class Group:
    """Samples that are handed to a worker together, which costs much less than one by one."""

    samples: Sequence[Sample]
    size_bytes: int


def groups(items: Iterable[Sample | Other], size: int) -> Iterator[Group | Other]:
    """Samples that follow each other, at most `size` and GROUP_BYTES together; anything else in its place."""
    samples: list[Sample] = []
    size_bytes = 0
    for item in items:
        more_bytes = len(item.picture) if isinstance(item, Sample) else 0
        full = len(samples) == size or size_bytes + more_bytes > GROUP_BYTES
        if samples and (full or not isinstance(item, Sample)):
            yield Group(samples, size_bytes)
            samples, size_bytes = [], 0
        if isinstance(item, Sample):
            samples.append(item)
            size_bytes += more_bytes
        else:
            yield item
    if samples:
        yield Group(samples, size_bytes)


class DecodePool:
    """Worker processes that decode samples in order, ahead of the consumer."""

    def __init__(
        self,
        decoding: Decoding,
        workers: int,
        memory_bytes: int = MEMORY_BYTES,
        cpu_limit_s: float = CPU_LIMIT_S,
    ):
        self.decoding = decoding
        self.limits = memory_bytes, cpu_limit_s
        self.depth = 2 * workers
        self.group_size = min(GROUP_SIZE, max(1, GROUP_BYTES // max_bytes(decoding)))
        # Each thread waits for the answer of one process.
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="decode")
        self.idle: SimpleQueue[DecodeWorker | None] = SimpleQueue()
        for _ in range(workers):
            self.idle.put(None)  # started when it is needed
        self.workers = workers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        for _ in range(self.workers):
            if worker := self.idle.get():
                worker.process.kill()

    def map(self, items: Iterable[Sample | Other]) -> Iterator[Result | Other]:
        """What becomes of each sample, in order; anything else is passed through in its place.

        At most `depth` groups of samples and WAITING_BYTES of pictures are read ahead.
        """
        waiting: deque[tuple[int, Future[Sequence[Result]] | Other]] = deque()
        waiting_bytes = 0

        def first() -> Sequence[Result | Other]:
            nonlocal waiting_bytes
            size_bytes, item = waiting.popleft()
            waiting_bytes -= size_bytes
            return item.result() if isinstance(item, Future) else [item]

        for item in groups(items, self.group_size):
            if isinstance(item, Group):
                waiting.append((item.size_bytes, self.threads.submit(self.decode_group, item)))
                waiting_bytes += item.size_bytes
            else:
                waiting.append((0, item))
            while len(waiting) > self.depth or waiting_bytes > WAITING_BYTES:
                yield from first()
        while waiting:
            yield from first()

    def decode_group(self, group: Group) -> Sequence[Result]:
        rejections = [self.decoding.reject_unseen(sample) for sample in group.samples]
        seen = [sample for sample, rejection in zip(group.samples, rejections, strict=True) if not rejection]
        decoded = iter(self.decode(seen))
        return [rejection or next(decoded) for rejection in rejections]

    def decode(self, samples: Sequence[Sample]) -> Sequence[Result]:
        """Decode in an idle worker. Where it dies, a fresh one tries again; OSError if none can be started."""
        worker = self.idle.get()
        results: list[Result] = []
        owed = deaths = 0
        alone = False
        try:
            while len(results) < len(samples):
                worker = worker or DecodeWorker(self.decoding, *self.limits)
                sample = samples[len(results)]
                try:
                    if not owed:
                        asked = [sample] if alone else samples[len(results) :]
                        worker.ask(asked)
                        owed = len(asked)
                    result = worker.answer(sample)
                    owed -= 1
                except (EOFError, OSError, BadAnswer) as error:
                    started, ended = worker.ready, worker.process.kill()
                    if isinstance(error, BadAnswer):
                        ended = f"a wrong answer: {error}"
                    worker, owed, alone = None, 0, True
                    deaths += 1
                    if deaths < TRIES:
                        continue
                    if not started:
                        raise OSError(
                            f"no worker process can be started to decode pictures: it ends with {ended}"
                        ) from None
                    result = Rejection(sample.key, "decoder_died", ended)
                else:
                    out_of_memory = isinstance(result, Rejection) and result.reason == "too_much_memory"
                    if out_of_memory and not (alone and worker.answered == 1):
                        # What other pictures take must not decide.
                        worker.process.kill()
                        worker, owed, alone = None, 0, True
                        continue
                results.append(result)
                deaths, alone = 0, False
            return results
        finally:
            self.idle.put(worker)


def serve(connection: Connection, decoding: Decoding, memory_bytes: int, cpu_limit_s: float) -> None:
    """What a worker process does: samples in, candidates or rejections out, until the connection is closed."""
    from PIL import Image

    Image.preinit()
    limit_memory(memory_bytes)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send_bytes(READY)
    # Libraries in C write their complaints about damaged pictures here.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    with quiet_pillow():
        while True:
            for sample in connection.recv():
                signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # its signal ends the process
                try:
                    result = decoding(sample)
                    answer = to_bytes(result)
                except MemoryError as error:
                    answer = to_bytes(Rejection(sample.key, "too_much_memory", f"MemoryError: {error}"))
                signal.setitimer(signal.ITIMER_PROF, 0)
                connection.send_bytes(answer)


def limit_memory(more_bytes: int) -> None:
    """From now on this process gets only so much more address space; what asks for more gets a MemoryError."""
    with suppress(FileNotFoundError):  # only Linux tells it here, and only Linux holds the limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
