"""An image tower for pictures of 128 pixels on a few CPU cores: a residual network (He et al. 2015, arXiv 1512.03385)
whose first convolution has a stride of a whole patch.

On a CPU with fast bfloat16 a small network is bound by memory traffic, most of it from the first layers, whose
activations have half and a quarter of the picture's side. Here the first layer's have a quarter or an eighth.

Shapes: N pictures, S side in pixels, P side of a patch, E features.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from dalle_lean.errors import UserError


class PatchResNet(nn.Module):
    """Pictures [N, 3, S, S] -> features [N, E].

    Args:
        embed_dim: E.
        image_size: S; a multiple of P * 2 ** (len(widths) - 1).
        patch_size: P, even; the stride of the first convolution, whose kernel is twice as wide.
        widths: channels at each resolution; the first has side S / P, each further one half of the one before.
        blocks: number of blocks at each resolution.

    Raises ValueError if these do not fit together.
    """

    def __init__(
        self, embed_dim: int, image_size: int, patch_size: int, widths: Sequence[int], blocks: Sequence[int]
    ) -> None:
        super().__init__()
        if not widths or len(widths) != len(blocks):
            raise UserError(f"widths={widths}, blocks={blocks}: must be one number for each resolution")
        if patch_size % 2:
            raise UserError(f"patch_size={patch_size}: must be even")
        if image_size % (patch_size << (len(widths) - 1)):
            raise UserError(
                f"image_size={image_size}: must be a multiple of {patch_size << (len(widths) - 1)}, for patches of "
                f"{patch_size} and {len(widths)} resolutions"
            )
        self.image_size = image_size
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 2 * patch_size, patch_size, patch_size // 2, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
        body: list[nn.Module] = []
        channels = widths[0]
        for level, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for number in range(count):
                body.append(Block(channels, width, stride=2 if level and not number else 1))
                channels = width
        self.body = nn.Sequential(*body)
        last_side = image_size // (patch_size << (len(widths) - 1))
        # Not averaged: captions say where in the picture things are.
        self.head = nn.Linear(channels * last_side**2, embed_dim)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.body(self.stem(pictures)).flatten(1))


class Block(nn.Module):
    """A residual block of two convolutions: [N, C, S, S] -> [N, D, S / stride, S / stride]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        nn.init.zeros_(self.second_norm.weight)  # each block starts as the identity
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.AvgPool2d(stride) if stride > 1 else nn.Identity(),
                nn.Conv2d(channels, width, 1, bias=False),
                nn.BatchNorm2d(width),
            )

    def forward(self, features: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(features)), inplace=True)
        return F.relu(self.second_norm(self.second(inner)).add_(self.shortcut(features)), inplace=True)
