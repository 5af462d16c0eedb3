"""A branch of a layer: LayerNorm, token shift, attention or feed-forward, LayerScale.

A branch is computed whole, or as the sum of chunks, each of which backward recomputes: groups of heads for attention,
ranges of tokens for feed-forward. LayerNorm and token shift run over a few samples and each chunk over a part of them,
so that peak memory grows neither with the batch nor with the width of the feed-forward.

B batch, b samples at once, S positions, D hidden size.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dalle_lean.model.attention import Layout, attend
from dalle_lean.model.compute_weights import ComputeWeights
from dalle_lean.model.layers import Attention, BranchParameters, FeedForward, normalise
from dalle_lean.model.memory_plan import MemoryPlan, ranges
from dalle_lean.model.token_shift import token_shift


class Chunk(NamedTuple):
    """A part of a branch; None is all heads, or all tokens."""

    heads: slice | None = None
    tokens: slice | None = None

    def view(self, x: Tensor) -> Tensor:
        """What it reads or adds to of a contiguous [b, S, D]: all of it, or its tokens [n, D]."""
        return x if self.tokens is None else x.view(-1, x.shape[-1])[self.tokens]


class Branch:
    """One branch of one layer over the positions of `layout`; the residual streams have `dtype`.

    kind: of attention; None for the feed-forward.
    """

    def __init__(
        self,
        own: BranchParameters,
        module: Attention | FeedForward,
        kind: str | None,
        layout: Layout,
        dtype: torch.dtype,
    ):
        self.own, self.module, self.kind, self.layout, self.dtype = own, module, kind, layout, dtype
        self.parameters: list[nn.Parameter] = [*own.parameters(), *module.parameters()]
        self.is_dense = layout.config.pixelfly_rank is None
        self.chunk_parameters = own.output_parameters + ([] if self.is_dense else list(module.parameters()))
        """Those of a chunk whose gradients autograd computes; the others are added in a dense projection's backward."""

    def __call__(self, x: Tensor, weights: ComputeWeights) -> Tensor:
        """The stream x [B, S, D] -> what the branch adds to it [B, S, D]."""
        return self._compute(self._prepare(x, weights), weights)

    @torch.no_grad()
    def add(self, source: Tensor, target: Tensor, weights: ComputeWeights, plan: MemoryPlan) -> None:
        """target += branch(source), in chunks; both contiguous [B, S, D]."""
        for x, out in zip(samples(source, plan), samples(target, plan), strict=True):
            h = self._prepare(x, weights)
            for chunk in self._chunks(h, plan):
                chunk.view(out).add_(self._compute(chunk.view(h), weights, chunk.heads))

    @torch.no_grad()
    def backward(
        self,
        source: Tensor,
        target: Tensor | None,
        grad_source: Tensor,
        grad_target: Tensor,
        weights: ComputeWeights,
        plan: MemoryPlan,
    ) -> None:
        """target -= branch(source), and the backward of `add`, in chunks; all contiguous [B, S, D].

        Adds to grad_source and to `weights.gradients`. target None: its value is not needed.
        """
        xs = samples(source, plan)
        outs = [None] * len(xs) if target is None else samples(target, plan)
        grads = zip(samples(grad_source, plan), samples(grad_target, plan), strict=True)
        for x, out, (grad_x, grad_out) in zip(xs, outs, grads, strict=True):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                h = self._prepare(leaf, weights)
            grad_h = torch.zeros_like(h)
            for chunk in self._chunks(h, plan):
                chunk.view(grad_h).add_(self._backward_chunk(chunk, h, out, grad_out, weights))
            grad_leaf = add_gradients(h, leaf, list(self.own.norm.parameters()), grad_h, weights)
            weights.add(grad_x, grad_leaf)

    def _backward_chunk(
        self, chunk: Chunk, h: Tensor, out: Tensor | None, grad_out: Tensor, weights: ComputeWeights
    ) -> Tensor:
        """Subtract the chunk's value from `out`; returns the gradient of its part of h."""
        with torch.enable_grad():
            leaf = chunk.view(h.detach()).requires_grad_()
            value = self._compute(leaf, weights, chunk.heads)
        if out is not None:
            chunk.view(out).sub_(value.detach())
        grad = chunk.view(grad_out).to(value.dtype)
        if weights.grad_scale != 1:
            grad = grad * weights.grad_scale
        return add_gradients(value, leaf, self.chunk_parameters, grad, weights)

    def _prepare(self, x: Tensor, weights: ComputeWeights) -> Tensor:
        """The stream [b, S, D] -> the module's input [b, S, D] in the compute dtype, contiguous."""
        h = normalise(self.own.norm, x).to(weights.dtype)
        if self.layout.config.token_shift:
            h = token_shift(h, self.layout.num_text, self.layout.side)
        return h.contiguous()

    def _chunks(self, h: Tensor, plan: MemoryPlan) -> Iterator[Chunk]:
        """Heads are computed all at once if a norm follows or the projections are not dense."""
        if isinstance(self.module, FeedForward):
            yield from (Chunk(tokens=tokens) for tokens in ranges(h.shape[:2].numel(), plan.feed_forward_tokens))
        elif plan.attention_heads is None or self.own.norm_out is not None or not self.is_dense:
            yield Chunk()
        else:
            yield from (Chunk(heads=heads) for heads in ranges(self.module.num_heads, plan.attention_heads))

    def _compute(self, h: Tensor, weights: ComputeWeights, heads: slice | None = None) -> Tensor:
        """The result of `_prepare`, or a chunk of it -> what it adds to the stream."""
        if isinstance(self.module, FeedForward):
            out = self.module(h, weights)
        else:
            assert self.kind is not None
            query, key, value = self.module.project(h, self.layout.table, weights, heads)
            out = self.module.merge(attend(query, key, value, self.kind, self.layout), weights, heads)
        return self.own.scale_output(out, self.dtype)


def add_gradients(
    value: Tensor, leaf: Tensor, parameters: Sequence[Tensor], grad: Tensor, weights: ComputeWeights
) -> Tensor:
    """Run backward from `value`: returns the gradient of `leaf`, adds those of the parameters to their buffers."""
    assert weights.gradients is not None
    buffers = [(p, buffer) for p in parameters if (buffer := weights.gradients.of(p)) is not None]
    grad_leaf, *grads = torch.autograd.grad(value, [leaf, *(p for p, _ in buffers)], grad)
    for (_, buffer), parameter_grad in zip(buffers, grads, strict=True):
        weights.add(buffer, parameter_grad)
    return grad_leaf


def samples(x: Tensor, plan: MemoryPlan) -> tuple[Tensor, ...]:
    """x [B, S, D] in views of as many samples as the plan takes at once."""
    return x.split(plan.samples or len(x))
