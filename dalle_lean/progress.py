"""How long work tells how far it is."""

from collections.abc import Callable

OnProgress = Callable[[int, int, str], None]
"""Called by long work with (done, total, note); the note is a few words such as the current loss."""
