"""A sample -> squares of pixels, or the reason to reject it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dalle_lean.images.files import MAX_PIXELS, UnusablePicture, open_picture, square_pixels
from preprocessing.encoding.duplicates import perceptual_hash
from preprocessing.encoding.filters import Rules
from preprocessing.sources import Sample

MAX_SIDE = 2**31 - 1  # shards hold sizes as int32
MIN_CROP_STEP = 8  # crops are at least one over this of their side apart


@dataclass(frozen=True)
class Rejection:
    """A picture that is not used, and why."""

    key: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A picture that passed the filter, with everything its rows hold besides the codes."""

    sample: Sample
    width: int  # of the original, in pixels, like height
    height: int
    pixels: NDArray[np.uint8]  # [views, side, side, 3], RGB; each view becomes a row
    hash: int | None = None  # perceptual hash of the first view, if duplicates are rejected

    @property
    def key(self) -> str:
        return self.sample.key


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a sample becomes pixels: all settings that affect them."""

    side: int  # pixels along a side
    rules: Rules = field(default_factory=Rules)
    max_pixels: int = MAX_PIXELS
    crops: int = 1
    """Squares cropped from a picture that is not square, evenly along its longer side; a single one is the centre."""
    flip: bool = False  # whether each square is followed by its mirror image

    def __call__(self, sample: Sample) -> Candidate | Rejection:
        """Filter the sample, and decode its pixels unless it is rejected."""
        if sample.problem:
            return Rejection(sample.key, sample.problem)
        if reason := self.rules.text_reject_reason(sample.caption, sample.text("NSFW")):
            return Rejection(sample.key, reason)
        try:
            image = open_picture(sample.picture, self.max_pixels)
            width = original_size(sample.metadata.get("original_width"), image.width)
            height = original_size(sample.metadata.get("original_height"), image.height)
            if reason := self.rules.size_reject_reason(width, height):
                return Rejection(sample.key, reason, f"{width}x{height} pixels")
            places = crop_places(image.width, image.height, self.crops)
            squares = [square_pixels(image, self.side, place) for place in places]
        except UnusablePicture as error:
            return Rejection(sample.key, error.reason, str(error))
        views = [view for square in squares for view in ((square, square[:, ::-1]) if self.flip else (square,))]
        return Candidate(
            sample=sample,
            width=width,
            height=height,
            pixels=np.stack(views),
            hash=None if self.rules.max_hash_distance is None else perceptual_hash(squares[0]),
        )

    @property
    def max_views(self) -> int:
        """Views of one picture, at most."""
        return self.crops * (1 + self.flip)


def crop_places(width: int, height: int, crops: int) -> Sequence[float]:
    """Where along the longer side to crop squares: 0 is its start, 1 its end. They are spread evenly, and fewer if they
    would be closer than an eighth of their side; a single one is the centre."""
    shorter, longer = sorted((width, height))
    count = min(crops, 1 + MIN_CROP_STEP * (longer - shorter) // max(shorter, 1))
    return (0.5,) if count == 1 else [index / (count - 1) for index in range(count)]


def original_size(claimed: Any, actual: int) -> int:
    """A side in pixels: what the metadata claims, else the picture's; 0 for a claim that is not a size."""
    if claimed is None:
        return actual
    if isinstance(claimed, int | float) and 0 < claimed <= MAX_SIDE:
        return int(claimed)
    return 0
