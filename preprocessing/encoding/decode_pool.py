"""Decoding in worker processes: a picture that ends its process or needs too much memory is counted, not fatal."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from dalle_lean.images.files import quiet_pillow
from preprocessing.encoding.decoding import Candidate, Decoding, Rejection
from preprocessing.encoding.worker_protocol import BadAnswer, from_bytes, max_bytes, to_bytes
from preprocessing.sources import Sample

MIN_MEMORY_BYTES = 128 * 2**20
MEMORY_BYTES = 2**30  # what a worker may allocate for a picture, besides the 150 MB of an idle worker
CPU_LIMIT_S = 30.0  # processor time for one picture; the largest allowed need a few seconds
END_TIMEOUT_S = 10.0
TRIES = 3  # a picture is blamed only after this many workers have died, since something else may have killed them
WAITING_BYTES = 256 * 2**20  # undecoded pictures read ahead
GROUP_SIZE = 8
GROUP_BYTES = 2**21  # limit for a group's picture files, and for their pixels; a larger picture is a group by itself

Result = Candidate | Rejection
Other = TypeVar("Other")


class WorkerDied(Exception):
    """A worker process ended, or was ended, before it answered; the message says how."""


class DecodeWorker:
    """One worker process, ready to decode. Raises WorkerDied, or OSError with the cause if a process cannot even load
    its `decoding`.

    Unlike those of multiprocessing, it never runs the caller's script again, inherits no open file but its connection,
    and ends whenever this process ends, because that closes its connection.
    """

    def __init__(self, decoding: Decoding, memory_bytes: int, cpu_limit_s: float):
        self.decoding = decoding
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                # -P: the current folder may contain a package `preprocessing`.
                [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl+C must reach only this process, which ends the others
            )
        self.connection = Connection(ours.detach())
        with self.detecting_death():
            self.connection.send((decoding, memory_bytes, cpu_limit_s))
            failure = self.connection.recv()
        if failure is not None:
            self.end()
            raise OSError(f"no worker process can be started to decode pictures: {failure}")

    def decode(self, samples: Sequence[Sample]) -> Iterator[Result]:
        """The result of each sample, as soon as it arrives."""
        with self.detecting_death():
            self.connection.send(samples)
        for sample in samples:
            with self.detecting_death():
                result = from_bytes(self.connection.recv_bytes(max_bytes(self.decoding)), sample, self.decoding)
            yield result

    def end(self) -> str:
        """Close the connection and wait for the process; returns how it ended."""
        self.connection.close()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> str:
        """Like `end`, but without waiting for the picture in work."""
        self.process.kill()
        return self.end()

    @contextmanager
    def detecting_death(self) -> Iterator[None]:
        try:
            yield
        except BadAnswer as error:
            self.kill()
            raise WorkerDied(f"a wrong answer: {error}") from None
        except (EOFError, OSError):
            raise WorkerDied(self.end()) from None


class DecodePool:
    """Worker processes that decode samples in order, ahead of the consumer."""

    def __init__(
        self, decoding: Decoding, workers: int, memory_bytes: int = MEMORY_BYTES, cpu_limit_s: float = CPU_LIMIT_S
    ):
        self.decoding = decoding
        self.limits = memory_bytes, cpu_limit_s
        self.group_size = min(GROUP_SIZE, max(1, GROUP_BYTES // max_bytes(decoding)))
        # Each thread waits for the answers of one process.
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
                worker.kill()

    def map(self, items: Iterable[Sample | Other]) -> Iterator[Result | Other]:
        """The result of each sample, in order; anything else is passed through in its place. At most two groups of
        samples for each worker, and WAITING_BYTES of pictures, are read ahead."""
        waiting: deque[tuple[int, Future[Any]]] = deque()
        for item in groups(items, self.group_size):
            if isinstance(item, list):
                waiting.append((picture_bytes(item), self.threads.submit(self.decode, item)))
            else:
                passed: Future[Any] = Future()
                passed.set_result([item])
                waiting.append((0, passed))
            while len(waiting) > 2 * self.workers or sum(size_bytes for size_bytes, _ in waiting) > WAITING_BYTES:
                yield from waiting.popleft()[1].result()
        for _, future in waiting:
            yield from future.result()

    def decode(self, samples: Sequence[Sample]) -> Sequence[Result]:
        """Decode in an idle worker; OSError if none can be started. Retries each picture that fails there alone."""
        results: list[Result] = []
        worker = self.idle.get()
        try:
            while len(results) < len(samples):
                worker = worker or self.start()
                with suppress(WorkerDied):
                    for result in worker.decode(samples[len(results) :]):
                        if isinstance(result, Rejection) and result.reason == "too_much_memory":
                            break
                        results.append(result)
                if len(results) < len(samples):
                    worker.kill()
                    worker = None
                    results.append(self.decode_alone(samples[len(results)]))
            return results
        finally:
            self.idle.put(worker)

    def decode_alone(self, sample: Sample) -> Result:
        """Decode in a fresh worker, where no other picture has taken memory."""
        death = ""
        for _ in range(TRIES - 1):
            worker = self.start()
            try:
                return next(worker.decode([sample]))
            except WorkerDied as error:
                death = str(error)
            finally:
                worker.kill()
        return Rejection(sample.key, "decoder_died", death)

    def start(self) -> DecodeWorker:
        death = ""
        for _ in range(TRIES):
            try:
                return DecodeWorker(self.decoding, *self.limits)
            except WorkerDied as error:
                death = str(error)
        raise OSError(f"no worker process can be started to decode pictures: it ends with {death}")


def groups(items: Iterable[Sample | Other], size: int) -> Iterator[list[Sample] | Other]:
    """Consecutive samples in groups of at most `size` and GROUP_BYTES; anything else is passed through in its place.
    Handing samples to a worker in groups costs much less than one by one."""
    group: list[Sample] = []
    for item in items:
        if group and not (
            isinstance(item, Sample) and len(group) < size and picture_bytes([*group, item]) <= GROUP_BYTES
        ):
            yield group
            group = []
        if isinstance(item, Sample):
            group.append(item)
        else:
            yield item
    if group:
        yield group


def picture_bytes(samples: Sequence[Sample]) -> int:
    return sum(len(sample.picture) for sample in samples)


def serve(descriptor: int) -> None:
    """The work of a worker process: samples in, candidates or rejections out, until the connection is closed. Its first
    message is None, or why it cannot load what decodes."""
    from PIL import Image

    connection = Connection(descriptor)
    with suppress(EOFError, ConnectionError), quiet_pillow():  # the errors of a parent that is gone
        try:
            decoding, memory_bytes, cpu_limit_s = connection.recv()
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
            return
        Image.preinit()
        limit_memory(memory_bytes)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        connection.send(None)  # ready
        # C libraries write complaints about damaged pictures to this descriptor.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
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
    """Limit this process to `more_bytes` more of address space; beyond that, allocations raise MemoryError."""
    with suppress(FileNotFoundError):  # only Linux has this file, and only Linux enforces the limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit, before = pages * resource.getpagesize() + more_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if before == resource.RLIM_INFINITY else min(limit, before)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
