"""Fonts and line breaks for text in pictures."""

import math
import unicodedata
from bisect import bisect_right
from functools import lru_cache

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

# Pillow finds them by file name among the system's fonts. Its built-in font has ASCII and little else.
WIDE_COVERAGE = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "arial.ttf")
NO_CHARACTER = "\uffff"


def lettering(text: str, size: int) -> tuple[str, Font]:
    """`text` as it can be drawn here, and a font of `size` pixels for it.

    The font is Pillow's own, or one of this machine's if that has more of the characters. A character that it lacks
    loses its accents, or becomes its name if it is a pictograph, or "?".
    """
    font = max(fonts(size), key=lambda each: sum(has_glyph(each, character) for character in text))
    return drawable(text, font), font


@lru_cache
def fonts(size: int) -> list[Font]:
    """Pillow's own font, then those of WIDE_COVERAGE that are installed."""
    found: list[Font] = [ImageFont.load_default(size)]
    for name in WIDE_COVERAGE:
        try:
            found.append(ImageFont.truetype(name, size))
        except OSError:  # not installed
            continue
    return found


def drawable(text: str, font: Font) -> str:
    """`text` with the characters that `font` lacks without their accents, as "[spouting whale]", or as "?"."""
    drawn = []
    for character in unicodedata.normalize("NFC", text):
        plain = "".join(part for part in unicodedata.normalize("NFKD", character) if not unicodedata.combining(part))
        if has_glyph(font, character):
            drawn.append(character)
        elif plain and all(has_glyph(font, part) for part in plain):
            drawn.append(plain)
        elif unicodedata.category(character) == "So" and (name := unicodedata.name(character, "")):
            drawn.append(f"[{name.lower()}]")
        elif unicodedata.category(character) not in ("Mn", "Cf"):  # neither an accent nor a sign that joins others
            drawn.append("?")
    return "".join(drawn)


@lru_cache(maxsize=4096)
def has_glyph(font: Font, character: str) -> bool:
    """Whether `font` draws a character otherwise than one that does not exist."""
    if character.isspace():
        return True
    if unicodedata.category(character) == "Cs":  # a lone surrogate: Pillow cannot encode it
        return False
    mask, missing = font.getmask(character), font.getmask(NO_CHARACTER)
    return (mask.size, bytes(mask)) != (missing.size, bytes(missing))


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
