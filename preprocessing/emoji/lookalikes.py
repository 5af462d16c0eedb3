"""Leaves out drawings that cannot be told apart at thumbnail size."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from preprocessing.emoji.sets import Drawing

THUMBNAIL_PIXELS = 32
SMALLEST_DISTANCE = 0.125  # root of the mean squared difference of two thumbnails, channels in 0..1


def without_lookalikes(
    drawings: Sequence[Drawing], sprites: Mapping[Drawing, Image.Image], dropped: Counter[str]
) -> list[Drawing]:
    """The drawings without those that look like one of the same set with a shorter name. All coloured shapes stay:
    their names have the colours that distinguish them."""
    kept: list[Drawing] = []
    seen: dict[str, list[NDArray[np.float32]]] = {}
    for drawing in sorted(drawings, key=lambda drawing: (len(drawing.thing.name), drawing.thing.name, drawing.set)):
        pixels = thumbnail(sprites[drawing])
        earlier = seen.setdefault(drawing.set, [])
        distances = [float(np.sqrt(((pixels - other) ** 2).mean())) for other in earlier]
        if drawing.thing.group != "shape" and min(distances, default=1.0) < SMALLEST_DISTANCE:
            dropped["look-alike"] += 1
            continue
        earlier.append(pixels)
        kept.append(drawing)
    return sorted(kept, key=lambda drawing: (drawing.set, drawing.thing.name))


def thumbnail(sprite: Image.Image) -> NDArray[np.float32]:
    """A sprite centred on black and on white, float32 [2, 32, 32, 3] in 0..1, so that its outline shows on one."""
    side = max(sprite.size)
    grounds: list[Image.Image] = []
    for ground in ("black", "white"):
        square = Image.new("RGBA", (side, side), ground)
        square.alpha_composite(sprite, ((side - sprite.width) // 2, (side - sprite.height) // 2))
        grounds.append(square.convert("RGB").resize((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Image.Resampling.BOX))
    return np.stack([np.asarray(picture, dtype=np.float32) / np.float32(255) for picture in grounds])
