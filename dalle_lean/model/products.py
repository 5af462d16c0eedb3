"""x W^T + b by the faster library: oneDNN instead of MKL for float32 on AMD's processors."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    *((torch.ops.mkldnn._linear_pointwise.default,) if HAS_ONEDNN else ()),
)
"""The operations that `linear` calls."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As torch's: x [..., n], weight [m, n], bias [m] -> [..., m]."""
    compiling = torch.compiler.is_compiling()  # Inductor takes constant weights only, and chooses by itself
    if compiling or x.dtype != torch.float32 or x.device.type != "cpu" or not onednn_is_faster():
        return F.linear(x, weight, bias)
    product = _OneDNNLinear.apply if torch.is_grad_enabled() else _onednn
    return product(x, weight, bias)


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN's float32 products are faster on this processor.

    Its maker's name decides, not a measurement: a machine must compute the same bits in every run.
    """
    try:
        return HAS_ONEDNN and "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()  # oneDNN multiplies some columns of a matrix by plain loops, 700 times as slow
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    """oneDNN's product, which torch cannot differentiate; the weight's gradient is torch's product, which is faster."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = _onednn(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
