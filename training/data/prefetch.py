"""Prefetching in a thread; long waits are reported."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
NOTICE_S = 10.0
POLL_S = 0.5
STOP_S = 1.0


def prefetch(
    items: Iterator[T],
    ahead: int,
    on_wait: Callable[[float], None] | None = None,
    stop_waiting: Callable[[], bool] | None = None,
) -> Generator[T, None, None]:
    """Yield the same items in the same order, at most `ahead` + 1 of them produced in advance.

    Args:
        items: iterated and closed in another thread; its exceptions are raised here.
        on_wait: called every NOTICE_S seconds of waiting for an item, with the seconds waited so far.
        stop_waiting: polled while waiting for an item; true ends the iteration early.

    Closing or dropping the generator ends the thread.
    """
    made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()  # items, and at last what ended them
    room = threading.Semaphore(ahead + 1)  # one more: the item that the thread is at
    stopped = threading.Event()

    def produce() -> None:
        try:
            while room.acquire() and not stopped.is_set():
                made.put((next(items), None))
        except BaseException as error:  # StopIteration at the end
            made.put((None, error))
        finally:
            if isinstance(items, Generator):
                items.close()

    def wait() -> tuple[Any, BaseException | None] | None:
        """The next entry of the queue, or None if `stop_waiting` says so."""
        started_s = noticed_s = time.monotonic()
        while True:
            try:
                return made.get(timeout=POLL_S)
            except Empty:
                now_s = time.monotonic()
                if stop_waiting is not None and stop_waiting():
                    return None
                if on_wait is not None and now_s - noticed_s >= NOTICE_S:
                    noticed_s = now_s
                    on_wait(now_s - started_s)

    thread = threading.Thread(target=produce, daemon=True, name="prefetch")
    thread.start()
    try:
        while (entry := wait()) is not None:
            item, error = entry
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            room.release()
            yield item
    finally:
        stopped.set()
        room.release()
        # A thread waiting for a remote may take longer, and ends with its wait.
        thread.join(STOP_S)
