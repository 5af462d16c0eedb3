"""Finds the thing on a plain ground by its pixels; the thresholds suit drawings such as emoji.

Shapes: H x W pixels of a picture, RGB in 0..255.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

BORDER_SHARE = 0.06
NOT_GROUND = 45.0  # pixels farther than this from the ground's colour, in Euclidean RGB distance, are not ground
SPECK_SHARE = 0.02  # a row or column with at most this share of such pixels holds only specks
MARGIN = 1 / 16  # ground kept on each side of a cut-out thing, as a share of its longer side

Mask = NDArray[np.bool_]


def pixels(picture: Image.Image) -> NDArray[np.float64]:
    """The RGB values of a picture, [H, W, 3]."""
    return np.asarray(picture.convert("RGB"), dtype=np.float64)


def ground_rgb(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ground's colour [3]: the median over the outer frame of pixels [H, W, 3]."""
    width = max(1, round(BORDER_SHARE * min(rgb.shape[:2])))
    frame = np.ones(rgb.shape[:2], dtype=bool)
    frame[width:-width, width:-width] = False
    return np.median(rgb[frame], axis=0)


def thing_mask(rgb: NDArray[np.float64]) -> Mask:
    """Which pixels of [H, W, 3] are not ground, [H, W]."""
    return np.linalg.norm(rgb - ground_rgb(rgb), axis=2) > NOT_GROUND


def extent(mask: Mask, axis: int) -> tuple[int, int]:
    """(first, last + 1) of the rows (axis 0) or columns (axis 1) with more than specks; (0, 0) if there are none."""
    places = np.flatnonzero(mask.mean(axis=1 - axis) > SPECK_SHARE)
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def cut_out(picture: Image.Image, side: int) -> Image.Image:
    """The thing, centred in side x side pixels of its ground; the whole picture if no thing is found."""
    picture = picture.convert("RGB")
    rgb = pixels(picture)
    mask = thing_mask(rgb)
    (top, bottom), (left, right) = extent(mask, axis=0), extent(mask, axis=1)
    if top == bottom or left == right:
        return picture.resize((side, side), Image.Resampling.BILINEAR)
    scale = side / ((1 + 2 * MARGIN) * max(bottom - top, right - left))
    width, height = (max(1, round(scale * length)) for length in (right - left, bottom - top))
    thing = picture.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
    square = Image.new("RGB", (side, side), tuple(ground_rgb(rgb).round().astype(int).tolist()))
    square.paste(thing, ((side - width) // 2, (side - height) // 2))
    return square
