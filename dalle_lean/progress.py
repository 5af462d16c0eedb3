"""The callbacks through which long work reports."""

from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]
"""Called by long work with (done, total, note); the note is a few words such as the current loss."""


def unwatched(done: int, total: int, note: str) -> None:
    """An OnProgress for callers that want none."""


OnNotice = Callable[[str], None]
"""Called with a line that a person should read at once."""


def silent(line: str) -> None:
    """An OnNotice for callers that want none."""
