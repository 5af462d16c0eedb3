"""PixelFly: a linear layer whose weight is a flat block butterfly plus a matrix of low rank.

Source: Chen et al. 2021, "Pixelated Butterfly: Simple and Efficient Sparse training for Neural Network Models",
section 3. A flat butterfly is the sum of the butterfly factors, not their product: output block i sees the input blocks
i, i ^ 1, i ^ 2, i ^ 4, ..., i ^ (butterfly_size / 2), where ^ is exclusive or. The paper's scales of the two terms are
absorbed into their weights.

N tokens, n = min(in, out) / b blocks of b channels, T = 1 + log2(butterfly_size) blocks that one block sees.
A rectangular weight repeats the square pattern along its longer side: r times in an input or R times in an output block
(r = 1 or R = 1).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from dalle_lean.errors import UserError


class _Pattern(NamedTuple):
    blocks: int
    repeat_in: int
    repeat_out: int
    strides: tuple[int, ...]


def _pattern(in_features: int, out_features: int, block_size: int, butterfly_size: int, rank: int) -> _Pattern:
    sizes = {"in_features": in_features, "out_features": out_features, "block_size": block_size}
    for name, value in {**sizes, "butterfly_size": butterfly_size}.items():
        if not isinstance(value, int) or value < 1:
            raise UserError(f"{name}={value!r}: must be a whole number of at least 1")
    short, long = sorted((in_features, out_features))
    if long % short:
        raise UserError(f"in_features={in_features}, out_features={out_features}: one must be a multiple of the other")
    if short % block_size:
        raise UserError(f"block_size={block_size}: must divide in_features={in_features}, out_features={out_features}")
    if butterfly_size & (butterfly_size - 1):
        raise UserError(f"butterfly_size={butterfly_size}: must be a power of two")
    blocks = short // block_size
    if blocks % butterfly_size:
        raise UserError(f"butterfly_size={butterfly_size}: must divide the {blocks} blocks of {block_size} channels")
    if not isinstance(rank, int) or not 0 <= rank <= short:
        raise UserError(f"rank={rank!r}: must be a whole number in 0..{short}")
    strides = (0, *(2**k for k in range(butterfly_size.bit_length() - 1)))
    return _Pattern(blocks, in_features // short, out_features // short, strides)


def pixelfly_parameters(
    in_features: int, out_features: int, block_size: int, butterfly_size: int, rank: int, bias: bool
) -> int:
    """Number of parameters of a `PixelFly` of these sizes; the same ValueErrors."""
    pattern = _pattern(in_features, out_features, block_size, butterfly_size, rank)
    butterfly = len(pattern.strides) * block_size * max(in_features, out_features)
    return butterfly + rank * (in_features + out_features) + bias * out_features


class PixelFly(nn.Module):
    """y = x (butterfly + low_rank_out low_rank_in)^T + bias, in place of `nn.Linear`.

    Args:
        in_features, out_features: one is a multiple of the other, both of block_size.
        block_size: channels of a block, b.
        butterfly_size: blocks that one butterfly mixes, a power of two that divides n; the largest stride is half of
            it. 1 is a block-diagonal weight.
        rank: of the low-rank term; 0 leaves it out.
        bias: add a learnt vector.

    Weights: blocks [T, n, r b, R b], of which [t, i] takes input block i to output block i ^ stride t; low_rank_in
    [rank, in]; low_rank_out [out, rank]; bias [out].

    Raises:
        ValueError: names the size, its value and what is allowed.
    """

    bias: nn.Parameter | None
    low_rank_in: nn.Parameter | None
    low_rank_out: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        block_size: int = 32,
        butterfly_size: int,
        rank: int,
        bias: bool = True,
        **factory: Any,
    ):
        super().__init__()
        self.in_features, self.out_features, self.block_size = in_features, out_features, block_size
        self.butterfly_size, self.rank = butterfly_size, rank
        self.pattern = _pattern(in_features, out_features, block_size, butterfly_size, rank)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory))

        blocks, repeat_in, repeat_out, strides = self.pattern
        self.blocks = weight(len(strides), blocks, repeat_in * block_size, repeat_out * block_size)
        self.low_rank_in = weight(rank, in_features) if rank else None
        self.low_rank_out = weight(out_features, rank) if rank else None
        self.bias = weight(out_features) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights that give outputs the same variance as `nn.Linear`'s.

        low_rank_in keeps the variance of its inputs, and the rest is like `nn.Linear` with T r b + rank inputs.
        """
        fan_in = len(self.pattern.strides) * self.pattern.repeat_in * self.block_size + self.rank
        nn.init.uniform_(self.blocks, -(fan_in**-0.5), fan_in**-0.5)
        if self.low_rank_in is not None and self.low_rank_out is not None:
            bound = math.sqrt(3 / self.in_features)
            nn.init.uniform_(self.low_rank_in, -bound, bound)
            nn.init.uniform_(self.low_rank_out, -(fan_in**-0.5), fan_in**-0.5)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(self.in_features**-0.5), self.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]. Backward keeps only x (and x reordered, if in > out)."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x has {x.shape[-1]} channels: this layer takes in_features={self.in_features}")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # once; each product would cast and keep its own copy
        out = self._butterfly(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)
        if self.low_rank_in is not None and self.low_rank_out is not None:
            return out.add_(linear(linear(x, self.low_rank_in), self.low_rank_out, self.bias))
        return out if self.bias is None else out.add_(self.bias)

    def _butterfly(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out]. Reorders products instead of inputs, so that autograd keeps no reordered inputs."""
        n, repeat_in, repeat_out, strides = self.pattern
        x = x.view(-1, repeat_in, n, self.block_size).permute(2, 0, 1, 3).flatten(2)  # [n, N, r b]
        diagonal, *others = self.blocks.unbind(0)
        out = torch.bmm(x, diagonal)  # [n, N, R b]
        for stride, blocks in zip(strides[1:], others, strict=True):
            pairs = torch.bmm(x, blocks).unflatten(0, (-1, 2, stride))
            out += pairs.flip(1).flatten(0, 2)
        return out.unflatten(2, (repeat_out, self.block_size)).permute(1, 2, 0, 3).reshape(-1, self.out_features)
