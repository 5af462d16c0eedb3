"""Ctrl+C, SIGTERM, or the end of the time given, between steps, never inside one."""

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
    """This many minutes from now, or (None) never; ValueError unless above 0."""

    def __init__(self, minutes: float | None):
        if minutes is not None and not minutes > 0:
            raise UserError(f"max_minutes={minutes}: must be above 0")
        self.end_s = None if minutes is None else monotonic() + 60 * minutes

    def reached(self) -> bool:
        """Whether the time is up."""
        return self.end_s is not None and monotonic() >= self.end_s


def raise_interrupt() -> NoReturn:
    """As Python does upon Ctrl+C."""
    raise KeyboardInterrupt


class Interruption:
    """Whether this process is to end after the step that it is in: call it."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self) -> bool:
        return self.signal is not None

    def end(self) -> None:
        """Raise what ends the process, KeyboardInterrupt or Terminated, if it is to end."""
        if self.signal == signal.SIGTERM:
            raise Terminated
        if self.signal is not None:
            raise KeyboardInterrupt


@contextmanager
def interrupt_deferred(
    on_notice: OnNotice | None = None,
    at_once: Callable[[], NoReturn] = raise_interrupt,
    on_terminate: Callable[[], None] = lambda: None,
) -> Iterator[Interruption]:
    """Yield whether Ctrl+C was pressed or SIGTERM came, to be called; the first signal is answered by a notice, Ctrl+C
    after it ends `at_once`. SIGTERM never does, since some send it twice; `on_terminate` is called for it.

    Elsewhere than in the main thread, where Python takes no signals, neither ever comes.
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
        if on_notice is not None:
            # In another thread: the signal may have stopped this one while it held what printing waits for.
            threading.Thread(target=on_notice, args=(NOTICES[signal.Signals(number)],)).start()

    before = {number: signal.signal(number, take) for number in NOTICES}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
