"""Stops a run between steps on Ctrl+C, on SIGTERM, or when its time is up."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import NoReturn

from dalle_lean.ending import Terminated
from dalle_lean.errors import UserError
from dalle_lean.progress import OnNotice

NOTICES = {
    signal.SIGINT: "finishing this step, then saving ... (Ctrl+C again stops at once)",
    signal.SIGTERM: "ended by SIGTERM: finishing this step, then saving ...",
}


class TimeLimit:
    """Ends `minutes` from now, or never (None); ValueError unless above 0."""

    def __init__(self, minutes: float | None):
        if minutes is not None and not minutes > 0:
            raise UserError(f"max_minutes={minutes}: must be above 0")
        self.end_s = None if minutes is None else monotonic() + 60 * minutes

    def reached(self) -> bool:
        return self.end_s is not None and monotonic() >= self.end_s


def raise_interrupt() -> NoReturn:
    raise KeyboardInterrupt


class Interruption:
    """Call it to learn whether a signal asked this process to end after the current step."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    def end(self) -> None:
        """Raise KeyboardInterrupt or Terminated if a signal came."""
        if self.signal == signal.SIGTERM:
            raise Terminated
        if self.signal is not None:
            raise KeyboardInterrupt


@contextmanager
def interrupt_deferred(
    on_notice: OnNotice,
    at_once: Callable[[], NoReturn] = raise_interrupt,
    on_terminate: Callable[[], None] = lambda: None,
) -> Iterator[Interruption]:
    """Defer Ctrl+C and SIGTERM during the block; yields a callable that tells whether one came.

    The first signal is answered with a notice, a later Ctrl+C with `at_once`. A later SIGTERM is ignored, since some
    senders repeat it; each calls `on_terminate`. Outside the main thread, where Python handles no signals, none comes.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def take(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            on_terminate()
        elif interruption():
            at_once()
        if interruption():
            return
        interruption.signal = number
        # In another thread: the signal may have interrupted this one while it held a lock that printing needs.
        threading.Thread(target=on_notice, args=(NOTICES[signal.Signals(number)],)).start()

    before = {number: signal.signal(number, take) for number in NOTICES}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
