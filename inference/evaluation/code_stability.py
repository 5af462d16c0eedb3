"""Whether a thing keeps its codes when the ground under it changes.

Shapes: N pictures, S side in pixels, I codes in a picture.
"""

from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

from dalle_lean.images.ground import ground_rgb, pixels, thing_mask
from dalle_lean.images.vqgan import VQGAN
from inference.evaluation.reconstruction import encode


def kept_on_other_ground(
    vqgan: VQGAN, pictures: Tensor, codes: Tensor, on_batch: Callable[[int], None] = lambda done: None
) -> float | None:
    """Of the codes whose patch a thing covers, the share that stays when the ground takes its complementary colour.

    The others have to be learnt for every ground. None where nothing covers a patch.

    Args:
        pictures: uint8 [N, 3, S, S].
        codes: theirs, [N, I].
    """
    step = vqgan.config.downscale
    repainted, covered = pictures.clone(), torch.zeros(codes.shape, dtype=torch.bool)
    for row, picture in enumerate(pictures):
        rgb = pixels(Image.fromarray(picture.permute(1, 2, 0).numpy()))
        mask = torch.from_numpy(thing_mask(rgb))
        other = torch.from_numpy(255 - ground_rgb(rgb).round()).byte()
        repainted[row] = torch.where(mask, picture, other[:, None, None])
        covered[row] = mask.unfold(0, step, step).unfold(1, step, step).flatten(2).all(dim=2).flatten()
    kept = (encode(vqgan, repainted, on_batch) == codes)[covered]
    return kept.float().mean().item() if len(kept) else None
