"""Line breaks for text in pictures."""

from PIL import ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


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
