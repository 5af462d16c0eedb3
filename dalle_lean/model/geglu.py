"""GEGLU: values gated by the Gaussian error linear unit of a second set (Shazeer 2020)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu


def geglu(x: Tensor) -> Tensor:
    """x [..., 2 n], values then gates -> values * gelu(gates), [..., n]. Backward keeps x alone."""
    out: Tensor = _Geglu.apply(x)
    return out


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        value, gate = x.chunk(2, dim=-1)
        return gelu(gate).mul_(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        value, gate = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_value, grad_gate = out.chunk(2, dim=-1)
        torch.mul(grad, gelu(gate), out=grad_value)
        torch.ops.aten.gelu_backward.grad_input(grad * value, gate, grad_input=grad_gate)
        return out
