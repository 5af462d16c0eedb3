"""Random augmentations of pictures that keep their captions true.

Shapes: B pictures in a batch, S side in pixels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

SHIFT, SCALE = 0.06, 0.1
"""The largest of `jitter`, in shares of the side."""


def jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each picture [B, 3, S, S] by up to SHIFT of its side and scale it by 1 +- SCALE; edge pixels repeat.

    No mirroring, no change of colour: captions mention left, right and colours.
    """
    draws = torch.rand(len(pixels), 3, generator=generator) * 2 - 1
    theta = torch.zeros(len(pixels), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 + SCALE * draws[:, 0]
    theta[:, :, 2] = 2 * SHIFT * draws[:, 1:]  # the grid spans -1..1
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid.to(pixels.device), padding_mode="border", align_corners=False)


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate each picture [B, 3, S, S] in 0..255 by up to 10 degrees, scale it by up to 15 % and shift it by up to 6 %.

    Of all pictures, 70 % have their channels mixed and shifted, possibly beyond 0..255, and 30 % are blurred. No
    mirroring: arrows and hands have a left and a right.
    """
    count = len(pixels)

    def uniform(*size: int) -> Tensor:
        return torch.rand(count, *size, generator=generator) * 2 - 1

    def chosen(share: float) -> Tensor:
        return torch.rand(count, 1, 1, 1, generator=generator) < share

    angle, scale = 0.17 * uniform(), 1 + 0.15 * uniform()
    cosine, sine = angle.cos() * scale, angle.sin() * scale
    rotation = torch.stack([cosine, -sine, sine, cosine], dim=1).view(count, 2, 2)
    theta = torch.cat([rotation, 0.12 * uniform(2)[:, :, None]], dim=2)  # the grid spans -1..1
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    mixing = torch.eye(3) + 0.2 * torch.randn(count, 3, 3, generator=generator)
    offset = 25 * torch.randn(count, 3, 1, 1, generator=generator)
    mixed = torch.einsum("bij,bjhw->bihw", mixing, moved - 127.5) + 127.5 + offset
    colored = torch.where(chosen(0.7), mixed, moved)
    return torch.where(chosen(0.3), F.avg_pool2d(colored, 3, stride=1, padding=1, count_include_pad=False), colored)
