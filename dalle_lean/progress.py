"""Callbacks through which long-running work reports."""

from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]
"""Called with (done, total, note); the note is a few words such as the current loss."""


def unwatched(done: int, total: int, note: str) -> None:
    """An OnProgress that does nothing."""


OnNotice = Callable[[str], None]  # called with a line that a person should read at once


def silent(line: str) -> None:
    """An OnNotice that does nothing."""


OnBatch = Callable[[int], None]  # called with the number of items newly done


def uncounted(done: int) -> None:
    """An OnBatch that does nothing."""
