"""The weights of one pass over the model in its compute dtype, and the buffers for their gradients."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dalle_lean.model.products import linear

IN_PLACE_DTYPES = (torch.float32, torch.float64)
"""Parameters of these dtypes can accumulate many small gradients in .grad without losing them to rounding."""


class GradientBuffers:
    """A gradient buffer for each parameter, to which a hand-written backward adds.

    Args:
        in_place: the buffers are the parameters' .grad, if its dtype is in IN_PLACE_DTYPES; otherwise they are float32
            or wider until `hand_over`.
    """

    def __init__(self, in_place: bool):
        self.in_place = in_place
        self._buffers: dict[int, Tensor] = {}

    def of(self, parameter: Tensor) -> Tensor | None:
        """The parameter's buffer; None if it needs no gradient."""
        if not parameter.requires_grad:
            return None
        if self.in_place and parameter.dtype in IN_PLACE_DTYPES:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            return parameter.grad
        if id(parameter) not in self._buffers:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._buffers[id(parameter)] = torch.zeros_like(parameter, dtype=dtype)
        return self._buffers[id(parameter)]

    def hand_over(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients that an autograd function returns for its inputs `parameters`; None for those in place."""
        buffers = [self._buffers.pop(id(parameter), None) for parameter in parameters]
        return [None if b is None else b.to(p.dtype) for p, b in zip(parameters, buffers, strict=True)]


@dataclass(frozen=True, eq=False)
class ComputeWeights:
    """The parameters in the dtype that a pass computes in."""

    dtype: torch.dtype
    gradients: GradientBuffers | None = None
    """Where a recomputing backward adds the gradients of parameters; None leaves them to autograd."""
    grad_scale: float = 1.0
    """The scale of incoming gradients, by which they are divided before they are added."""
    overflow: Tensor | None = None
    """A boolean scalar that becomes true if a gradient is not finite; None does not check."""
    converted: dict[int, Tensor] = field(default_factory=dict)
    """Parameters converted to the compute dtype, by id."""

    def add(self, buffer: Tensor, grad: Tensor) -> None:
        """Add a gradient, divided by its scale, to a buffer of any float dtype.

        If overflow is checked, entries that are not finite are recorded and count as zeros.
        """
        if self.overflow is not None:
            self.overflow.logical_or_(~grad.isfinite().all())
            grad = grad.nan_to_num(0.0, 0.0, 0.0)
        buffer.add_(grad, alpha=1 / self.grad_scale)

    def cast(self, parameter: Tensor) -> Tensor:
        """The parameter in the compute dtype, converted once for all layers that share it."""
        if parameter.dtype == self.dtype:
            return parameter
        if id(parameter) not in self.converted:
            self.converted[id(parameter)] = parameter.to(self.dtype)
        return self.converted[id(parameter)]

    def project(
        self,
        layer: nn.Module,
        x: Tensor,
        rows: slice = slice(None),
        columns: slice = slice(None),
        with_bias: bool = True,
    ) -> Tensor:
        """`layer(x)`; for an nn.Linear also for only some outputs (rows) and inputs (columns)."""
        if not isinstance(layer, nn.Linear):
            # A recomputing backward asks for the gradients of the parameters themselves, not of a shared conversion.
            convert = self.cast if self.gradients is None else lambda parameter: parameter.to(self.dtype)
            return functional_call(layer, {name: convert(weight) for name, weight in layer.named_parameters()}, x)
        weight = self.cast(layer.weight)[rows, columns]
        has_bias = with_bias and layer.bias is not None
        bias = self.cast(layer.bias)[rows] if has_bias else None
        if self.gradients is None:
            return linear(x, weight, bias)
        weight_grad, bias_grad = self.gradients.of(layer.weight), self.gradients.of(layer.bias) if has_bias else None
        return _Linear.apply(
            x,
            weight.detach(),
            None if bias is None else bias.detach(),
            None if weight_grad is None else weight_grad[rows, columns],
            None if bias_grad is None else bias_grad[rows],
            self,
        )


class _Linear(torch.autograd.Function):
    """x [..., n] -> x W^T + b [..., m]; backward adds the gradients of W and b to buffers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_grad: Tensor | None,
        bias_grad: Tensor | None,
        weights: ComputeWeights,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_grad, ctx.bias_grad, ctx.weights = weight_grad, bias_grad, weights
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
        if ctx.weight_grad is not None:
            if ctx.weights.overflow is None and ctx.weight_grad.dtype == rows.dtype:
                ctx.weight_grad.addmm_(rows.t(), inputs)  # no temporary; without overflow checks the scale is 1
            else:
                ctx.weights.add(ctx.weight_grad, rows.t() @ inputs)
        if ctx.bias_grad is not None:
            ctx.weights.add(ctx.bias_grad, rows.sum(0, dtype=ctx.bias_grad.dtype))
        return linear(grad, weight.t()), None, None, None, None, None
