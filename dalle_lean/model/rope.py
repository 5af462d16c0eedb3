"""Rotary positions over text, rows and columns.

P text positions, f side of the code grid, d head size; rot = d // 3 channels for each of three blocks: the position in
the text, the row and the column; n = rot // 2 angles a block. Channels past 6 n are not rotated.
Source: Su et al. 2021 (RoFormer), with dalle-pytorch's axial frequencies for the picture.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TEXT_POSITION_OF_IMAGE = 8192.0
PICTURE_POSITION_OF_TEXT = -10.0
HIGHEST_PICTURE_FREQUENCY = 5.0


def rotary_angles(num_text: int, side: int, head_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Angles in radians of every position, float32: [P + f * f, 3 n].

    Computed in float32, as in the training of the published checkpoints: 8192 times a frequency rounds visibly.
    """
    rot = head_size // 3
    n = rot // 2
    text_frequency = 1.0 / (10000 ** (torch.arange(0, 2 * n, 2, device=device).float() / rot))
    picture_frequency = torch.linspace(1.0, HIGHEST_PICTURE_FREQUENCY, n, device=device) * math.pi

    text_position = torch.full((num_text + side * side,), TEXT_POSITION_OF_IMAGE, device=device)
    text_position[:num_text] = torch.arange(num_text, device=device).float()
    outside = torch.full((num_text,), PICTURE_POSITION_OF_TEXT, device=device)
    axis = torch.linspace(-1.0, 1.0, side, device=device)
    row = torch.cat([outside, axis.repeat_interleave(side)])
    column = torch.cat([outside, axis.repeat(side)])
    picture = [row[:, None] * picture_frequency, column[:, None] * picture_frequency]
    return torch.cat([text_position[:, None] * text_frequency, *picture], dim=1)


def rotary_table(angles: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(i angle) of each angle: complex, in float64 for float64 activations, else in float32."""
    angles = angles.to(torch.float64 if dtype == torch.float64 else torch.float32)
    return torch.complex(angles.cos(), angles.sin())


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate adjacent pairs of channels of x [..., S, d] by the angles of their positions.

    table: complex [..., S, m], see `rotary_table`, of the first m <= d / 2 pairs, m = 3 n with `rotary_angles`; the
    dimensions before S broadcast with x's.
    """
    return _Rotation.apply(x, table)


class _Rotation(torch.autograd.Function):
    """Rotates pairs as complex numbers; backward rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _rotate_pairs(x, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (table,) = ctx.saved_tensors
        return _rotate_pairs(grad, table.conj()), None


def _rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """x [..., S, d] times the unit numbers `rotation` [..., S, m], in their precision; contiguous."""
    # One product over whole heads is faster than one over some of their channels and a copy of the rest.
    rotation = F.pad(rotation, (0, x.shape[-1] // 2 - rotation.shape[-1]), value=1.0)
    copy = x.to(rotation.real.dtype, memory_format=torch.contiguous_format, copy=True)
    pairs = torch.view_as_complex(copy.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs.mul_(rotation)).flatten(-2).to(x.dtype)
