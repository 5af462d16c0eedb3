"""Random changes of pictures that leave their captions true.

Shapes: B pictures of a batch, S side in pixels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def jitter(pixels: Tensor, generator: torch.Generator, shift: float = 0.06, scale: float = 0.1) -> Tensor:
    """Move each picture [B, 3, S, S] by up to `shift` of its side and scale it by up to 1 +- `scale`; edges repeat.

    No mirroring and no change of colour: captions speak of left, right and colours.
    """
    draws = torch.rand(len(pixels), 3, generator=generator) * 2 - 1
    theta = torch.zeros(len(pixels), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 + scale * draws[:, 0]
    theta[:, :, 2] = 2 * shift * draws[:, 1:]  # in grid units the side is 2
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid.to(pixels.device), padding_mode="border", align_corners=False)


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture [B, 3, S, S] in 0..255 turned (up to 10 degrees), scaled (15 %) and moved (6 %); seven of ten with
    mixed channels, lighter or darker, which may leave 0..255; three of ten blurred.

    No mirroring: arrows and hands have sides.
    """
    count = len(pixels)

    def uniform(*size: int) -> Tensor:
        return torch.rand(count, *size, generator=generator) * 2 - 1

    def some(share: float) -> Tensor:
        return torch.rand(count, 1, 1, 1, generator=generator) < share

    angle, scale = 0.17 * uniform(), 1 + 0.15 * uniform()
    theta = torch.stack(
        [
            torch.stack([angle.cos() * scale, -angle.sin() * scale], dim=1),
            torch.stack([angle.sin() * scale, angle.cos() * scale], dim=1),
        ],
        dim=1,
    )
    theta = torch.cat([theta, 0.12 * uniform(2)[:, :, None]], dim=2)  # in grid units the side is 2
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    mixing = torch.eye(3) + 0.2 * torch.randn(count, 3, 3, generator=generator)
    lighter = 25 * torch.randn(count, 3, 1, 1, generator=generator)
    mixed = torch.einsum("bij,bjhw->bihw", mixing, moved - 127.5) + 127.5 + lighter
    drawn = torch.where(some(0.7), mixed, moved)
    return torch.where(some(0.3), F.avg_pool2d(drawn, 3, stride=1, padding=1, count_include_pad=False), drawn)
