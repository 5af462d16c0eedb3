"""What stands on a plain ground, by its pixels; the bounds fit drawings such as emoji.

Shapes: H x W pixels of a picture, RGB in 0..255.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

BORDER_SHARE = 0.06
NOT_GROUND = 45.0
"""Euclidean distance in RGB from which a pixel does not belong to the ground."""
SPECK_SHARE = 0.02
"""So few pixels of a row or column are no part of a thing."""
MARGIN = 1 / 16
"""Ground around a thing that is cut out, as a share of its longer side."""

Mask = NDArray[np.bool_]


def pixels(picture: Image.Image) -> NDArray[np.float64]:
    """[H, W, 3]."""
    return np.asarray(picture.convert("RGB"), dtype=np.float64)


def ground_rgb(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of the outer frame of [H, W, 3]: [3]."""
    width = max(1, round(BORDER_SHARE * min(rgb.shape[:2])))
    frame = np.ones(rgb.shape[:2], dtype=bool)
    frame[width:-width, width:-width] = False
    median: NDArray[np.float64] = np.median(rgb[frame], axis=0)
    return median


def thing_mask(rgb: NDArray[np.float64]) -> Mask:
    """[H, W]: what is not the ground."""
    mask: Mask = np.linalg.norm(rgb - ground_rgb(rgb), axis=2) > NOT_GROUND
    return mask


def extent(mask: Mask, axis: int) -> tuple[int, int]:
    """The first row (axis 0) or column (1) of more than specks, and the one after the last; (0, 0) without any."""
    places = np.flatnonzero(mask.mean(axis=1 - axis) > SPECK_SHARE)
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def cut_out(picture: Image.Image, side: int) -> Image.Image:
    """The thing in the middle of side x side pixels of its ground; the whole picture where nothing stands out."""
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
