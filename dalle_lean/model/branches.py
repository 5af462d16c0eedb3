"""The two branches of a layer, as functions of the stream and as the chunks that backward recomputes.

B batch, b samples at once, S positions, D hidden size, H heads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dalle_lean.model.attention import Layout, attend
from dalle_lean.model.compute_weights import ComputeWeights
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.layers import Attention, BranchParameters, FeedForward, normalise
from dalle_lean.model.memory_plan import MemoryPlan, ranges
from dalle_lean.model.token_shift import token_shift


@dataclass(frozen=True)
class SequenceContext:
    """What branches need to know about the positions that they run over."""

    config: DalleConfig
    layout: Layout
    table: Tensor | None
    """Rotary cosines and sines, [2, S, 3 n]."""
    dtype: torch.dtype
    """Of the residual streams."""

    def shift(self, x: Tensor) -> Tensor:
        """Token shift where the config has it; x [B, S, D] from position 0."""
        return token_shift(x, self.layout.num_text, self.layout.side) if self.config.token_shift else x


class Chunk(NamedTuple):
    """Part of a branch."""

    tokens: slice | None
    """Tokens that it reads and adds to; None is all."""
    run: Callable[[Tensor, ComputeWeights], Tensor]
    """Maps its part of `prepare`'s result to what it adds to the stream."""

    def view(self, x: Tensor) -> Tensor:
        """Its part of a contiguous [b, S, D]: all of it, or its tokens [n, D]."""
        return x if self.tokens is None else x.view(-1, x.shape[-1])[self.tokens]


class LayerBranch:
    """LayerNorm, token shift, a module that layers share, LayerScale.

    input_parameters are those of `prepare`; output_parameters those after the projections, which every chunk uses.
    """

    def __init__(self, branch: BranchParameters, module: nn.Module, context: SequenceContext):
        self.branch, self.module, self.context = branch, module, context
        self.input_parameters: list[nn.Parameter] = list(branch.norm.parameters())
        norm_out = [] if branch.norm_out is None else list(branch.norm_out.parameters())
        self.output_parameters: list[nn.Parameter] = [branch.scale, *norm_out]
        self.parameters: list[nn.Parameter] = [*branch.parameters(), *module.parameters()]

    def prepare(self, x: Tensor, weights: ComputeWeights) -> Tensor:
        """The stream [b, S, D] -> the module's input [b, S, D] in the compute dtype, contiguous."""
        return self.context.shift(normalise(self.branch.norm, x).to(weights.dtype)).contiguous()

    def run(self, x: Tensor, weights: ComputeWeights) -> Tensor:
        """The stream x [B, S, D] -> what the whole branch adds to it [B, S, D]."""
        return self.inner(self.prepare(x, weights), weights)

    def inner(self, h: Tensor, weights: ComputeWeights) -> Tensor:
        """The result of `prepare` -> what is added to the stream; also for a chunk of both."""
        raise NotImplementedError

    def chunks(self, shape: torch.Size, plan: MemoryPlan) -> Iterator[Chunk]:
        """The chunks of a stream of shape [b, S, D] under the plan; the branch is their sum."""
        raise NotImplementedError


class AttentionBranch(LayerBranch):
    """The attention of one layer; its chunks are groups of heads."""

    module: Attention

    def __init__(self, branch: BranchParameters, module: Attention, context: SequenceContext, kind: str):
        super().__init__(branch, module, context)
        self.kind = kind

    def chunks(self, shape: torch.Size, plan: MemoryPlan) -> Iterator[Chunk]:
        """Groups of heads; all at once if a norm follows or the projections are not dense."""
        divisible = self.branch.norm_out is None and isinstance(self.module.qkv, nn.Linear)
        if plan.attention_heads is None or not divisible:
            yield Chunk(None, self.inner)
            return
        for heads in ranges(self.module.num_heads, plan.attention_heads):
            yield Chunk(None, partial(self.inner, heads=heads))

    def inner(self, h: Tensor, weights: ComputeWeights, heads: slice | None = None) -> Tensor:
        query, key, value = self.module.project(h, self.context.table, weights, heads)
        outputs = attend(query, key, value, self.kind, self.context.layout)
        return self.branch.scale_output(self.module.merge(outputs, weights, heads), self.context.dtype)


class FeedForwardBranch(LayerBranch):
    """The feed-forward of one layer; its chunks are ranges of tokens."""

    module: FeedForward

    def chunks(self, shape: torch.Size, plan: MemoryPlan) -> Iterator[Chunk]:
        """Ranges of tokens."""
        for tokens in ranges(shape[0] * shape[1], plan.feed_forward_tokens):
            yield Chunk(tokens, self.inner)

    def inner(self, h: Tensor, weights: ComputeWeights) -> Tensor:
        return self.branch.scale_output(self.module(h, weights), self.context.dtype)
