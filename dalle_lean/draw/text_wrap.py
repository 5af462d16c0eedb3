"""Text on drawn sheets."""

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def wrapped(text: str, font: Font, width: int) -> list[str]:
    """`text` in lines no wider than `width` pixels where spaces allow it."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
