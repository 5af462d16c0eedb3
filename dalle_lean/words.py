"""Counts with their nouns, amounts with their units, names that a misspelt one may mean, text cut or made UTF-8."""

from collections.abc import Iterable
from difflib import get_close_matches


def utf8(text: str) -> str:
    """`text` with lone surrogates replaced: command-line bytes that are not UTF-8, or escapes in foreign JSON."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def shortened(text: str, length: int = 60) -> str:
    """`text` in one line of at most `length` characters; it ends in dots if it was cut."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 3].rstrip()}..."


def counted(count: int, noun: str) -> str:
    """`count` and `noun`, in the regular plural unless the count is 1: "1 shard", "1,200 batches"."""
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def human(count: float, unit: str) -> str:
    """3 digits with the unit and its decimal prefix: 11.5 TFLOP."""
    for prefix in ("", *"kMGTPEZ"):
        if abs(count) < 999.5:
            return f"{count:.3g} {prefix}{unit}"
        count /= 1000
    return f"{count:.3g} Y{unit}"


def human_bytes(count: float) -> str:
    """3 digits with the decimal unit: 1.23 GB."""
    return human(count, "B")


def perhaps(name: str, known: Iterable[str]) -> str:
    """ " (did you mean tiny?)": names the known name closest to a misspelt one; empty if none is close."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
