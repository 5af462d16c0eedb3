"""One branch of one layer, recomputed in backward a chunk at a time.

A branch is value(x) = the sum of chunk(prepare(x)) over its chunks: ranges of tokens for feed-forward, groups of heads
for attention. `prepare` (LayerNorm, token shift) runs over a few samples and each chunk over a part of them, so that
peak memory grows neither with the batch nor with the width of the feed-forward.

B batch, b samples at once, S positions, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dalle_lean.model.branches import Chunk, LayerBranch
from dalle_lean.model.compute_weights import ComputeWeights
from dalle_lean.model.memory_plan import MemoryPlan


@torch.no_grad()
def forward_branch(
    branch: LayerBranch, source: Tensor, target: Tensor, weights: ComputeWeights, plan: MemoryPlan
) -> None:
    """target += branch(source), both contiguous [B, S, D]."""
    for x, out in zip(samples(source, plan), samples(target, plan), strict=True):
        h = branch.prepare(x, weights)
        for chunk in branch.chunks(h.shape, plan):
            chunk.view(out).add_(chunk.run(chunk.view(h), weights))


@torch.no_grad()
def backward_branch(
    branch: LayerBranch,
    source: Tensor,
    target: Tensor | None,
    grad_source: Tensor,
    grad_target: Tensor,
    weights: ComputeWeights,
    plan: MemoryPlan,
) -> None:
    """target -= branch(source), and the branch's backward; all contiguous [B, S, D].

    Adds to grad_source and to `weights.gradients`. target None: its value is not needed.
    """
    xs = samples(source, plan)
    outs = [None] * len(xs) if target is None else samples(target, plan)
    grads = zip(samples(grad_source, plan), samples(grad_target, plan), strict=True)
    for x, out, (grad_x, grad_out) in zip(xs, outs, grads, strict=True):
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            h = branch.prepare(leaf, weights)
        grad_h = torch.zeros_like(h)
        for chunk in branch.chunks(h.shape, plan):
            grad_chunk = _backward_chunk(chunk, h, out, grad_out, branch.output_parameters, weights)
            chunk.view(grad_h).add_(grad_chunk)
        grad_leaf = _backward(h, leaf, branch.input_parameters, grad_h, weights)
        grad_x.add_(weights.finite(grad_leaf), alpha=1 / weights.grad_scale)


def _backward_chunk(
    chunk: Chunk, h: Tensor, out: Tensor | None, grad_out: Tensor, parameters: Sequence[Tensor], weights: ComputeWeights
) -> Tensor:
    """Subtract the chunk's value from `out`; returns the gradient of its part of h."""
    with torch.enable_grad():
        leaf = chunk.view(h.detach()).requires_grad_()
        value = chunk.run(leaf, weights)
    if out is not None:
        chunk.view(out).sub_(value.detach())
    grad = chunk.view(grad_out).to(value.dtype)
    if weights.grad_scale != 1:
        grad = grad * weights.grad_scale
    return _backward(value, leaf, parameters, grad, weights)


def _backward(
    value: Tensor, leaf: Tensor, parameters: Sequence[Tensor], grad: Tensor, weights: ComputeWeights
) -> Tensor:
    """The gradient of `leaf`; those of the parameters are added to their buffers."""
    assert weights.gradients is not None
    wanted = [(p, weights.gradients.of(p)) for p in parameters]
    inputs = [p for p, buffer in wanted if buffer is not None]
    grad_leaf, *grads = torch.autograd.grad(value, [leaf, *inputs], grad)
    for buffer, parameter_grad in zip((b for _, b in wanted if b is not None), grads, strict=True):
        weights.add(buffer, parameter_grad)
    return grad_leaf


def samples(x: Tensor, plan: MemoryPlan) -> tuple[Tensor, ...]:
    """x [B, S, D] in views of as many samples as the plan takes at once."""
    return x.split(plan.samples or len(x))
