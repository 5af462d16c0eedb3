"""Pictures and what was asked for, side by side on one white sheet."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from dalle_lean.draw.text_wrap import wrapped
from inference.gallery import MARGIN, enlarged

SIDE = 160
COLUMNS = 4
LINES = 3
LINE_HEIGHT = 15


def captioned_sheet(pictures: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """Rows of four pictures, each caption below its picture in at most three lines."""
    cell_width, cell_height = SIDE + MARGIN, SIDE + LINES * LINE_HEIGHT + MARGIN
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGB", (MARGIN + COLUMNS * cell_width, MARGIN + rows * cell_height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left = MARGIN + place % COLUMNS * cell_width
        top = MARGIN + place // COLUMNS * cell_height
        sheet.paste(enlarged(picture, SIDE), (left, top))
        for line, text in enumerate(wrapped(caption, font, SIDE)[:LINES]):
            draw.text((left, top + SIDE + 3 + LINE_HEIGHT * line), text, fill="black", font=font)
    return sheet
