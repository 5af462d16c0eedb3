"""What a picture shows, judged by its pixels only; the thresholds fit the drawings of the five emoji sets.

Shapes: H x W pixels of a picture.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dalle_lean.images.ground import SPECK_SHARE, Mask, extent, ground_rgb, pixels, thing_mask

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black")
SMALL, BIG = 0.45, 0.65
"""A thing is small below the first and big above the second share of its longer side in the picture's."""
LEAST_SHARE = 0.005  # a colour with a smaller share of the pixels is an edge or a blur, not a thing
GAP = 0.09  # of the side: things that are counted stand farther apart than the parts of one
BITS = 5  # upper bits of each channel that index the table of colour names


def ground_colour(picture: Image.Image) -> str:
    """The colour of the border: one of COLOURS or "white"."""
    return name_of(ground_rgb(pixels(picture)))


def thing_colour(picture: Image.Image) -> str | None:
    """The colour of the thing on the ground, by the median of its pixels; None if there is no thing."""
    rgb = pixels(picture)
    thing = rgb[thing_mask(rgb)]
    return name_of(np.median(thing, axis=0)) if len(thing) else None


def thing_size(picture: Image.Image) -> str | None:
    """ "small" or "big", by the longer side of the thing's bounding box; None in between and without a thing."""
    mask = thing_mask(pixels(picture))
    spans = [extent(mask, axis) for axis in (0, 1)]
    share = max((end - start) / length for (start, end), length in zip(spans, mask.shape, strict=True))
    if share == 0:
        return None
    return "small" if share < SMALL else "big" if share > BIG else None


def thing_count(picture: Image.Image) -> int:
    """How many things stand apart, in rows, and in each row side by side."""
    mask = thing_mask(pixels(picture))
    return sum(len(spans(mask[top:bottom], axis=1)) for top, bottom in spans(mask, axis=0))


def spans(mask: Mask, axis: int) -> list[tuple[int, int]]:
    """(first, last + 1) of the rows (axis 0) or columns (axis 1) between gaps in which there are but specks."""
    places = np.flatnonzero(mask.mean(axis=1 - axis) > SPECK_SHARE)
    cuts = np.flatnonzero(np.diff(places) > GAP * mask.shape[axis]) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts) if len(run)]


def colour_centre(picture: Image.Image, colour: str) -> tuple[float, float] | None:
    """Mean place (across, down), 0..1, of the thing's pixels of this colour; None if there are too few."""
    rgb = pixels(picture)
    found = thing_mask(rgb) & (name_table()[tuple((rgb.astype(int) >> (8 - BITS)).transpose(2, 0, 1))] == colour)
    if found.mean() < LEAST_SHARE:
        return None
    down, across = np.nonzero(found)
    return float(across.mean() + 0.5) / found.shape[1], float(down.mean() + 0.5) / found.shape[0]


@cache
def name_table() -> NDArray[np.str_]:
    """The names of all colours, [2^BITS, 2^BITS, 2^BITS] by red, green and blue."""
    levels = 2**BITS
    values = (np.indices((levels,) * 3).reshape(3, -1).T + 0.5) * (256 / levels)
    return np.array([name_of(value) for value in values]).reshape((levels,) * 3)


def name_of(rgb: NDArray[np.float64]) -> str:
    """The name of one colour, RGB 0..255, by hue, saturation and value."""
    red, green, blue = (float(channel) / 255 for channel in rgb)
    value, low = max(red, green, blue), min(red, green, blue)
    saturation = (value - low) / value if value > 0 else 0.0
    if value < 0.34:
        return "black"
    if saturation < 0.15:
        return "white" if value > 0.6 else "black"
    hue = _hue(red, green, blue)
    if (hue < 45 or hue >= 350) and value < 0.8 and saturation < (0.65 if value > 0.6 else 0.8):
        return "brown"
    if hue >= 335 or hue < 12:
        return "red" if saturation >= 0.58 else "pink"
    if hue < 36.5:
        return "orange"
    if hue < 65:
        return "yellow"
    if hue < 170:
        return "green"
    if hue < 250:
        return "blue"
    return "purple" if hue < 300 else "pink"


def _hue(red: float, green: float, blue: float) -> float:
    """Degrees, 0..360."""
    value, spread = max(red, green, blue), max(red, green, blue) - min(red, green, blue)
    if value == red:
        return 60 * (((green - blue) / spread) % 6)
    if value == green:
        return 60 * ((blue - red) / spread + 2)
    return 60 * ((red - green) / spread + 4)
