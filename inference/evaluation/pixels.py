"""Which named colour a picture shows, judged by its pixels; the bounds fit the drawings of the five emoji sets."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black")
BORDER_SHARE = 0.06
NOT_GROUND = 45.0
"""Euclidean distance in RGB from which a pixel does not belong to the ground."""


def ground_colour(picture: Image.Image) -> str:
    """The colour of the border: one of COLOURS or "white"."""
    rgb = np.asarray(picture.convert("RGB"), dtype=np.float64)
    return name_of(np.median(border(rgb), axis=0))


def main_colour(picture: Image.Image) -> str:
    """The colour of a thing that stands on white, by the median of its pixels: one of COLOURS or "white"."""
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64).reshape(-1, 3)
    thing = pixels[np.linalg.norm(pixels - 255, axis=1) > NOT_GROUND]
    return name_of(np.median(thing, axis=0)) if len(thing) else "white"


def border(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """The pixels of the outer frame of [H, W, 3]: [n, 3]."""
    width = max(1, round(BORDER_SHARE * len(rgb)))
    inside = np.zeros(rgb.shape[:2], dtype=bool)
    inside[width:-width, width:-width] = True
    return rgb[~inside]


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
