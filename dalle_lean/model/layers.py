"""The parameters of the layers. A layer has two branches, attention and feed-forward; a Block has the weights of both,
which several layers may share (`DalleConfig.layer_blocks`), and a Layer has what each branch owns.

B batch, S positions, D hidden size, H heads, d head size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.functional import gelu, layer_norm

from dalle_lean.model.compute_weights import ComputeWeights
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.pixelfly import PixelFly
from dalle_lean.model.rope import rotate


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, "Primer")."""
    return functional.relu(x).square()


def geglu(x: Tensor) -> Tensor:
    """x [..., 2 n], values then gates -> values * gelu(gates), [..., n] (Shazeer 2020). Only x is kept for backward."""
    return _Geglu.apply(x)


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


FFN_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    "relu_squared": relu_squared,
}


def projection(
    config: DalleConfig, in_features: int, out_features: int, bias: bool = True, **factory: Any
) -> nn.Module:
    """A dense linear map, or the sparse one that the config asks for."""
    if config.pixelfly_rank is None:
        return nn.Linear(in_features, out_features, bias=bias, **factory)
    return PixelFly(
        in_features,
        out_features,
        block_size=config.pixelfly_block_size,
        butterfly_size=config.pixelfly_butterfly_size,
        rank=config.pixelfly_rank,
        bias=bias,
        **factory,
    )


class Attention(nn.Module):
    """Multi-head attention whose queries, keys and values are all rotated (as in the code of the paper's run)."""

    def __init__(self, config: DalleConfig, **factory: Any):
        super().__init__()
        inner = config.num_heads * config.head_size
        self.num_heads, self.head_size = config.num_heads, config.head_size
        self.qkv = projection(config, config.hidden_size, 3 * inner, bias=config.attention_bias, **factory)
        self.out = projection(config, inner, config.hidden_size, **factory)

    def project(
        self, x: Tensor, table: Tensor | None, weights: ComputeWeights, heads: slice | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, D] -> queries, keys and values of `heads` (None: all), [B, H, S, d] each.

        table: their rotation, for a stack of the three (see `rope.rotate`); None rotates nothing.
        """
        if heads is None:
            qkv = weights.project(self.qkv, x).unflatten(-1, (3, self.num_heads, -1))
        else:
            qkv = torch.stack([weights.project(self.qkv, x, rows=rows) for rows in self._rows(heads)], dim=-2)
            qkv = qkv.unflatten(-1, (-1, self.head_size))
        qkv = qkv.permute(2, 0, 3, 1, 4)
        query, key, value = (qkv if table is None else rotate(qkv, table)).unbind(0)
        return query, key, value

    def _rows(self, heads: slice) -> list[slice]:
        """The outputs of qkv with the queries, the keys and the values of these heads."""
        inner = self.num_heads * self.head_size
        start, stop = heads.start * self.head_size, heads.stop * self.head_size
        return [slice(third * inner + start, third * inner + stop) for third in range(3)]

    def merge(self, outputs: Tensor, weights: ComputeWeights, heads: slice | None = None) -> Tensor:
        """Outputs of `heads` (None: all) [B, H, S, d] -> their part of [B, S, D]; the first head adds the bias."""
        merged = outputs.transpose(1, 2).flatten(2)
        if heads is None:
            return weights.project(self.out, merged)
        columns = slice(heads.start * self.head_size, heads.stop * self.head_size)
        return weights.project(self.out, merged, columns=columns, with_bias=heads.start == 0)


class FeedForward(nn.Module):
    """Feed-forward; if gated, the gate is the second half of the first layer's output (Shazeer 2020)."""

    def __init__(self, config: DalleConfig, **factory: Any):
        super().__init__()
        inner = config.ffn_multiplier * config.hidden_size
        self.gated = config.ffn_gated
        self.activation = FFN_FUNCTIONS[config.ffn_activation]
        self.up = projection(config, config.hidden_size, (1 + self.gated) * inner, **factory)
        self.down = projection(config, inner, config.hidden_size, **factory)

    def forward(self, x: Tensor, weights: ComputeWeights) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        return weights.project(self.down, self.activate(weights.project(self.up, x)))

    def activate(self, up: Tensor) -> Tensor:
        """The result of `up` -> the input of `down`."""
        if not self.gated:
            return self.activation(up)
        if self.activation is functional.gelu:
            return geglu(up)
        value, gate = up.chunk(2, dim=-1)
        return value * self.activation(gate)


class Block(nn.Module):
    """The weights of attention and feed-forward, for one or several layers."""

    def __init__(self, config: DalleConfig, **factory: Any):
        super().__init__()
        self.attention = Attention(config, **factory)
        self.feed_forward = FeedForward(config, **factory)


class BranchParameters(nn.Module):
    """What a branch owns: LayerNorm before, LayerScale (Touvron et al. 2021) after attention or feed-forward."""

    def __init__(self, config: DalleConfig, layer: int, **factory: Any):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, **factory)
        self.norm_out = nn.LayerNorm(config.hidden_size, **factory) if config.sandwich_norm else None
        self.scale = nn.Parameter(torch.full((config.hidden_size,), initial_scale(layer), **factory))

    @property
    def output_parameters(self) -> list[nn.Parameter]:
        """Those that `scale_output` uses."""
        return [self.scale, *([] if self.norm_out is None else self.norm_out.parameters())]

    def scale_output(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The block's output -> what the branch adds to its stream, in the stream's `dtype`; [B, S, D]."""
        x = x.to(dtype)
        return self.scale.to(dtype) * (x if self.norm_out is None else normalise(self.norm_out, x))


def normalise(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm in x's dtype, whatever the weights' dtype."""
    return layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


class Layer(nn.Module):
    """What the two branches of one layer own."""

    def __init__(self, config: DalleConfig, layer: int, **factory: Any):
        super().__init__()
        self.attention = BranchParameters(config, layer, **factory)
        self.feed_forward = BranchParameters(config, layer, **factory)


def initial_scale(layer: int) -> float:
    """Initial LayerScale of layer `layer`, counted from 0: 0.1 in the first 18, 1e-5 in the next 6, then 1e-6."""
    if layer < 18:
        return 0.1
    return 1e-5 if layer < 24 else 1e-6
