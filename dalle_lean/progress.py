"""The callback through which long work reports its progress."""

from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]
"""Called by long work with (done, total, note); the note is a few words such as the current loss."""
