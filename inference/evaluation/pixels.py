"""What a picture shows, judged by its pixels alone; the bounds fit the drawings of the five emoji sets.

Shapes: H x W pixels of a picture.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black")
BORDER_SHARE = 0.06
NOT_GROUND = 45.0
"""Euclidean distance in RGB from which a pixel does not belong to the ground."""
SMALL, BIG = 0.45, 0.65
"""Longer side of a thing as a share of the picture's, between which it is neither small nor big."""
SPECK_SHARE = 0.02
"""So few pixels of a row or column are no part of a thing."""
LEAST_SHARE = 0.005
"""So few pixels of a colour, of all, are an edge or a blur and no thing."""
BITS = 5
"""Of a channel that the table of colour names tells apart."""

Mask = NDArray[np.bool_]


def ground_colour(picture: Image.Image) -> str:
    """The colour of the border: one of COLOURS or "white"."""
    return name_of(ground_rgb(pixels(picture)))


def thing_colour(picture: Image.Image) -> str | None:
    """The colour of what stands on the ground, by the median of its pixels; None where nothing does."""
    rgb = pixels(picture)
    thing = rgb[thing_mask(rgb)]
    return name_of(np.median(thing, axis=0)) if len(thing) else None


def thing_size(picture: Image.Image) -> str | None:
    """ "small", "big" or None for between and for nothing, by the longer side of the box around what stands on the
    ground."""
    mask = thing_mask(pixels(picture))
    extent = max(span(mask.mean(axis=axis) > SPECK_SHARE) for axis in (0, 1))
    if extent == 0:
        return None
    return "small" if extent < SMALL else "big" if extent > BIG else None


def colour_centre(picture: Image.Image, colour: str) -> tuple[float, float] | None:
    """Mean place (across, down), 0..1, of the pixels of this colour that are no ground; None where they are too few."""
    rgb = pixels(picture)
    found = thing_mask(rgb) & (name_table()[tuple((rgb.astype(int) >> (8 - BITS)).transpose(2, 0, 1))] == colour)
    if found.mean() < LEAST_SHARE:
        return None
    down, across = np.nonzero(found)
    return float(across.mean() + 0.5) / found.shape[1], float(down.mean() + 0.5) / found.shape[0]


def pixels(picture: Image.Image) -> NDArray[np.float64]:
    """[H, W, 3] in 0..255."""
    return np.asarray(picture.convert("RGB"), dtype=np.float64)


def ground_rgb(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of the outer frame of [H, W, 3]: [3]."""
    width = max(1, round(BORDER_SHARE * len(rgb)))
    frame = np.ones(rgb.shape[:2], dtype=bool)
    frame[width:-width, width:-width] = False
    median: NDArray[np.float64] = np.median(rgb[frame], axis=0)
    return median


def thing_mask(rgb: NDArray[np.float64]) -> Mask:
    """[H, W]: what is not the ground."""
    mask: Mask = np.linalg.norm(rgb - ground_rgb(rgb), axis=2) > NOT_GROUND
    return mask


def span(filled: Mask) -> float:
    """From the first to the last that is true, as a share of all."""
    places = np.flatnonzero(filled)
    return float(places[-1] - places[0] + 1) / len(filled) if len(places) else 0.0


@cache
def name_table() -> NDArray[np.str_]:
    """The names of all colours, [2^BITS] * 3 by red, green and blue."""
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
