"""Line breaks for text in pictures."""

import math
from bisect import bisect_right

from dalle_lean.draw.fonts import Font


def wrapped(text: str, font: Font, width: int) -> list[str]:
    """`text` broken at spaces into lines of at most `width` pixels; a longer word gets a line of its own."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def wrapped_within(text: str, font: Font, width: int, most: int) -> list[str]:
    """`text` in at most `most` lines no wider than `width` pixels; a text that is cut ends in dots."""
    lines = wrapped(text, font, width)
    cut = len(lines) > most
    return [fitted(line, font, width, cut and number == most - 1) for number, line in enumerate(lines[:most])]


def fitted(line: str, font: Font, width: int, cut: bool) -> str:
    """`line`, shortened to at most `width` pixels; it ends in dots if it is shortened or `cut`."""
    if not cut and font.getlength(line) <= width:
        return line
    lengths = range(len(line) + 1)
    fitting = bisect_right(lengths, width, key=lambda length: math.ceil(font.getlength(line[:length] + "...")))
    return line[: max(0, fitting - 1)] + "..."
