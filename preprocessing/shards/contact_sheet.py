"""A sheet that shows a data set: its statistics, and some of its pictures, decoded, with their captions."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from dalle_lean.draw.fonts import Font, lettering, wrapped_within
from dalle_lean.images.files import to_uint8
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.progress import OnProgress, unwatched
from preprocessing.shards.files import Rows
from preprocessing.shards.statistics import ShardStatistics

COLUMNS = 8
TILE_SIDE = 192
MARGIN = 16
CAPTION_LINES = 3
LINE_HEIGHT = 17
FACT_HEIGHT = 24
BARS_WIDTH = 420
BARS_HEIGHT = 110
NUM_BARS = 60
DECODED_AT_ONCE = 8
INK, GREY, BLUE, FRAME = "black", "#555555", "#3b6ea5", "#cccccc"


def decode_sample(rows: Rows, vqgan: VQGAN, on_progress: OnProgress = unwatched) -> list[Image.Image]:
    """Decode the rows' codes on the VQGAN's device."""
    pictures: list[Image.Image] = []
    for first in range(0, len(rows), DECODED_AT_ONCE):
        codes = rows.codes[first : first + DECODED_AT_ONCE]
        images = vqgan.decode(torch.from_numpy(codes.astype(np.int64)))
        pixels = to_uint8(images).cpu().permute(0, 2, 3, 1).numpy()
        pictures += [Image.fromarray(picture) for picture in pixels]
        on_progress(len(pictures), len(rows), "")
    return pictures


def contact_sheet(title: str, statistics: ShardStatistics, pictures: Sequence[Image.Image]) -> Image.Image:
    """The statistics, and below them `pictures`, decoded from `statistics.sample`, each with its caption."""
    title, title_font = lettering(title, 20)
    fact_font = ImageFont.load_default(15)
    columns = max(1, min(COLUMNS, len(pictures)))
    side = max([TILE_SIDE, *(max(picture.size) for picture in pictures)])
    cell_width, cell_height = side + MARGIN, side + MARGIN + CAPTION_LINES * LINE_HEIGHT + 8
    facts = [*statistics.facts(), ("shown below", statistics.shown())]
    facts_width = 620
    width = max(MARGIN + columns * cell_width, 2 * MARGIN + facts_width + BARS_WIDTH)
    top = MARGIN + 32 + max(FACT_HEIGHT * len(facts), 2 * (BARS_HEIGHT + 30)) + MARGIN
    sheet = Image.new("RGB", (width, top + -(-len(pictures) // columns) * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN, MARGIN), title, fill=INK, font=title_font)
    for line, (name, value) in enumerate(facts):
        y = MARGIN + 32 + FACT_HEIGHT * line
        draw.text((MARGIN, y), name, fill=GREY, font=fact_font)
        draw.text((MARGIN + 180, y), value, fill=INK, font=fact_font)
    left = max(MARGIN + facts_width, width - MARGIN - BARS_WIDTH)
    lengths = length_bars(statistics)
    draw_bars(
        draw, (left, MARGIN), lengths, f"captions by length, 0 to {statistics.caption_length(1)} characters", fact_font
    )
    uses = use_bars(statistics.code_counts)
    below = MARGIN + BARS_HEIGHT + 30
    draw_bars(draw, (left, below), uses, "use of the codes, from the most to the least frequent", fact_font)
    for place, (picture, caption) in enumerate(zip(pictures, statistics.sample.captions, strict=True)):
        x, y = MARGIN + place % columns * cell_width, top + place // columns * cell_height
        larger = picture if picture.width == side else picture.resize((side, side), Image.Resampling.LANCZOS)
        sheet.paste(larger, (x, y))
        draw.rectangle((x - 1, y - 1, x + side, y + side), outline=FRAME)  # otherwise a white picture has no edge
        caption, font = lettering(caption, 13)
        for line, words in enumerate(wrapped_within(caption, font, side, CAPTION_LINES)):
            draw.text((x, y + side + 4 + line * LINE_HEIGHT), words, fill=GREY, font=font)
    return sheet


def length_bars(statistics: ShardStatistics) -> NDArray[np.float64]:
    """The number of captions in each of NUM_BARS ranges of length."""
    lengths = np.array(list(statistics.caption_lengths), dtype=np.float64)
    times = np.array(list(statistics.caption_lengths.values()), dtype=np.float64)
    return np.histogram(lengths, bins=NUM_BARS, range=(0, statistics.caption_length(1) + 1), weights=times)[0]


def use_bars(code_counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean use of codes in each of NUM_BARS groups (fewer if there are fewer codes), in descending order."""
    parts = np.array_split(np.sort(code_counts)[::-1].astype(np.float64), min(NUM_BARS, len(code_counts)))
    return np.array([part.mean() for part in parts])


def draw_bars(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], values: NDArray[np.float64], title: str, font: Font
) -> None:
    """Draw a bar chart with a title above; the highest bar has BARS_HEIGHT pixels."""
    left, top = corner
    draw.text((left, top), title, fill=GREY, font=font)
    bottom = top + 20 + BARS_HEIGHT
    step = BARS_WIDTH / len(values)
    for number, value in enumerate(values):
        height = round(BARS_HEIGHT * value / max(values.max(), 1e-9))
        if height:
            right = left + (number + 1) * step - 2
            draw.rectangle((left + number * step, bottom - height, max(right, left + number * step), bottom), fill=BLUE)
    draw.line((left, bottom, left + BARS_WIDTH, bottom), fill=GREY)
