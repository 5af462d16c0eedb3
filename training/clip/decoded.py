"""Pictures after encoding and decoding by a VQGAN, so that a CLIP learns to score drawn pictures.

Shapes: N pictures, S side in pixels.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dalle_lean.images.files import to_uint8
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import sha256_file
from dalle_lean.precision import autocast
from dalle_lean.progress import OnProgress
from training.clip.recipe import ClipRecipe
from training.data.image_text import ImageTextPairs
from training.data.pixels import Pixels, in_file

AT_ONCE = 64


def partly_decoded(
    data: ImageTextPairs, store: Path, vqgan: Path, recipe: ClipRecipe, device: str, on_progress: OnProgress | None
) -> ImageTextPairs:
    """`data` with a random share of its pictures replaced by VQGAN reconstructions, stored in the file `store`."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(recipe.seed))
    rows = order[: round(recipe.decoded_share * len(data))]
    made_from = f"{data.digest()} {sha256_file(vqgan / 'config.json')} {recipe.seed} {len(rows)}"

    def fill(decoded: Tensor) -> None:
        decode(VQGAN.load(vqgan).to(device), data.pixels.take(rows), decoded, device, on_progress)

    decoded, _ = in_file(store, made_from, len(rows), recipe.picture_side, fill)
    return replace(data, pixels=data.pixels.replaced(rows, decoded))


@torch.no_grad()
def decode(vqgan: VQGAN, pixels: Pixels, decoded: Tensor, device: str, on_progress: OnProgress | None = None) -> None:
    """Encode and decode pictures, and write them into `decoded`, uint8 [N, 3, S, S]."""
    for start in range(0, len(pixels), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        with autocast(torch.device(device).type, "bf16"):
            images = vqgan.decode(vqgan.encode(pixels[part].to(device).float() / 255))
        decoded[part] = to_uint8(images.float()).cpu()
        if on_progress is not None:
            on_progress(min(part.stop, len(pixels)), len(pixels), "pictures encoded and decoded")
