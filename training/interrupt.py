"""Ctrl+C, or the end of the time given, between steps, never inside one."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import NoReturn

from training.progress import OnNotice

NOTICE = "finishing this step, then saving ... (Ctrl+C again stops at once)"


class TimeLimit:
    """So many minutes from now, or (None) for ever; ValueError unless there are any."""

    def __init__(self, minutes: float | None):
        if minutes is not None and not minutes > 0:
            raise ValueError(f"max_minutes={minutes}: must be above 0")
        self.end_s = None if minutes is None else monotonic() + 60 * minutes

    def reached(self) -> bool:
        """Whether the time is up."""
        return self.end_s is not None and monotonic() >= self.end_s


def raise_interrupt() -> NoReturn:
    """As Python does upon Ctrl+C."""
    raise KeyboardInterrupt


@contextmanager
def interrupt_deferred(
    on_notice: OnNotice | None = None, at_once: Callable[[], NoReturn] = raise_interrupt
) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl+C was pressed; the first press is answered by a notice, the second ends
    `at_once`.

    Elsewhere than in the main thread, where Python takes no signals, it never was.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            at_once()
        pressed.set()
        if on_notice is not None:
            # In a thread of its own: the signal may have stopped this one while it held what printing waits for.
            threading.Thread(target=on_notice, args=(NOTICE,)).start()

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
