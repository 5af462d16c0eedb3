"""Token shift: part of each position's channels comes from its neighbours."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_shift(x: Tensor, num_text: int, side: int) -> Tensor:
    """Shift channels of x [B, S, D] whose first `num_text` positions are text and the rest codes in raster order.

    Text: the lower half of the channels comes from the previous position (zeros at position 0).
    Codes: the first quarter comes from the code above (zeros in row 0), the second quarter from the left neighbour
    (zeros in column 0). The upper half is always the position's own.
    """
    return _TokenShift.apply(x, num_text, side)


class _TokenShift(torch.autograd.Function):
    """Copies every channel once; backward copies every gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_text: int, side: int) -> Tensor:
        ctx.num_text, ctx.side = num_text, side
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        out[..., x.shape[-1] // 2 :] = x[..., x.shape[-1] // 2 :]
        for source, target, steps in zip(_parts(x, num_text), _parts(out, num_text), (1, side, 1), strict=True):
            target[:, steps:] = source[:, : max(source.shape[1] - steps, 0)]
            target[:, :steps] = 0
        _parts(out, num_text)[2][:, ::side] = 0
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        out[..., grad.shape[-1] // 2 :] = grad[..., grad.shape[-1] // 2 :]
        grads, outs = _parts(grad, ctx.num_text), _parts(out, ctx.num_text)
        for source, target, steps in zip(grads, outs, (1, ctx.side, 1), strict=True):
            kept = max(source.shape[1] - steps, 0)
            target[:, :kept] = source[:, steps:]
            target[:, kept:] = 0
        outs[2][:, ctx.side - 1 :: ctx.side] = 0
        return out, None, None


def _parts(x: Tensor, num_text: int) -> tuple[Tensor, Tensor, Tensor]:
    """The channels that move: of the text, of codes from above, of codes from the left."""
    half, quarter = x.shape[-1] // 2, x.shape[-1] // 4
    return x[:, :num_text, :half], x[:, num_text:, :quarter], x[:, num_text:, quarter:half]
