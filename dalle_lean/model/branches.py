"""The two branches of a layer, as functions of the stream and as the pieces that lean backward computes them in.

B batch, b samples at once, S positions, D hidden size, H heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dalle_lean.model.attention import Layout, attend
from dalle_lean.model.compute_weights import Weights
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.layers import Attention, Branch, FeedForward
from dalle_lean.model.memory_plan import MemoryPlan
from dalle_lean.model.recompute import Piece, ranges
from dalle_lean.model.token_shift import token_shift


@dataclass(frozen=True)
class Surroundings:
    """What branches need to know of the positions they run over."""

    config: DalleConfig
    layout: Layout
    table: Tensor | None
    """Rotary cosines and sines, [2, S, 3 n]."""
    dtype: torch.dtype
    """Of the residual streams."""

    def shift(self, x: Tensor) -> Tensor:
        """Token shift where the config has it; x [B, S, D] from position 0."""
        return token_shift(x, self.layout.num_text, self.layout.side) if self.config.token_shift else x


class LayerBranch:
    """LayerNorm, token shift, a module that layers share, LayerScale."""

    def __init__(self, own: Branch, module: nn.Module, surroundings: Surroundings):
        self.own, self.module, self.surroundings = own, module, surroundings
        self.entry: list[nn.Parameter] = list(own.norm.parameters())
        self.exit: list[nn.Parameter] = [own.scale, *([] if own.norm_out is None else own.norm_out.parameters())]
        self.parameters: list[nn.Parameter] = [*own.parameters(), *module.parameters()]

    def enter(self, x: Tensor, weights: Weights) -> Tensor:
        """The stream [b, S, D] -> what the module reads, in the dtype of the computation."""
        h = self.own.enter(x)
        return self.surroundings.shift(h if weights.dtype is None else h.to(weights.dtype)).contiguous()

    def leave(self, x: Tensor) -> Tensor:
        """What the module gives -> what is added to the stream."""
        return self.own.leave(x, self.surroundings.dtype)


class AttentionBranch(LayerBranch):
    """The attention of one layer; its pieces are groups of heads."""

    module: Attention

    def __init__(self, own: Branch, module: Attention, surroundings: Surroundings, kind: str):
        super().__init__(own, module, surroundings)
        self.kind = kind

    def run(self, x: Tensor, weights: Weights) -> Tensor:
        """What the branch adds to the stream x [B, S, D], as a whole."""
        return self._attend(self.enter(x, weights), weights)

    def pieces(self, shape: torch.Size, plan: MemoryPlan) -> Iterator[Piece]:
        """Groups of heads; all at once where a norm follows or the projections are not dense."""
        del shape
        divisible = self.own.norm_out is None and isinstance(self.module.qkv, nn.Linear)
        if plan.attention_heads is None or not divisible:
            yield Piece(lambda x: x, self._attend)
            return
        for heads in ranges(self.module.num_heads, plan.attention_heads):
            yield Piece(lambda x: x, partial(self._attend, heads=heads))

    def _attend(self, h: Tensor, weights: Weights, heads: slice | None = None) -> Tensor:
        query, key, value = self.module.project(h, self.surroundings.table, weights, heads)
        outputs = attend(query, key, value, self.kind, self.surroundings.layout)
        return self.leave(self.module.merge(outputs, weights, heads))


class FeedForwardBranch(LayerBranch):
    """The feed-forward of one layer; its pieces are ranges of tokens."""

    module: FeedForward

    def run(self, x: Tensor, weights: Weights) -> Tensor:
        """What the branch adds to the stream x [B, S, D], as a whole."""
        return self._feed(self.enter(x, weights), weights)

    def pieces(self, shape: torch.Size, plan: MemoryPlan) -> Iterator[Piece]:
        """Ranges of tokens."""
        for tokens in ranges(shape[0] * shape[1], plan.feed_forward_tokens):
            yield Piece(partial(_tokens, tokens=tokens), self._feed)

    def _feed(self, h: Tensor, weights: Weights) -> Tensor:
        return self.leave(self.module(h, weights))


def _tokens(x: Tensor, tokens: slice) -> Tensor:
    """A range of the tokens of a contiguous [b, S, D], [tokens, D]."""
    return x.view(-1, x.shape[-1])[tokens]
