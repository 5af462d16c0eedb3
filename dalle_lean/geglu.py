"""GEGLU: values gated by the Gaussian error linear unit of a second set (Shazeer 2020)."""

import math
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
        """With the normal distribution's Phi and phi: gelu(g) = g Phi(g), gelu'(g) = Phi(g) + g phi(g)."""
        (x,) = ctx.saved_tensors
        value, gate = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        grad_value, grad_gate = out.chunk(2, dim=-1)
        cumulative = (gate * math.sqrt(0.5)).erf_().add_(1).mul_(0.5)
        torch.mul(grad, gate, out=grad_value).mul_(cumulative)
        slope = (gate * gate).mul_(-0.5).exp_().mul_(gate)
        cumulative.add_(slope, alpha=1 / math.sqrt(2 * math.pi))
        torch.mul(grad, value, out=grad_gate).mul_(cumulative)
        return out
