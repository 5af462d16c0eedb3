"""Composition of all layers' branches: one residual stream or two, and where backward gets activations.

B batch, S positions, D hidden size. Branches alternate: attention and feed-forward of each layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dalle_lean.model.branches import Branch
from dalle_lean.model.compute_weights import ComputeWeights, GradientBuffers
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.model.memory_plan import MemoryPlan
from dalle_lean.model.products import PRODUCTS


def run_keeping(x: Tensor, branches: Sequence[Branch], weights: ComputeWeights, reversible: bool) -> Tensor:
    """Run the branches over x [B, S, D]; autograd keeps all activations.

    One stream: x += F(x); x += G(x) for each layer. Reversible, two streams a = b = x: a += F(b); b += G(a) for each
    layer, then their mean.
    """
    source = target = x
    for branch in branches:
        value = target + branch(source, weights)
        source, target = value, (source if reversible else value)
    return (source + target) / 2 if reversible else source


def run_selective(x: Tensor, branches: Sequence[Branch], weights: ComputeWeights) -> Tensor:
    """One stream; autograd keeps each layer's input and its projections' outputs, and recomputes the rest."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_projections)
    for first in range(0, len(branches), 2):
        layer = branches[first : first + 2]
        x = checkpoint(run_keeping, x, layer, weights, reversible=False, use_reentrant=False, context_fn=contexts)
    return x


def _keep_projections(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def run_recomputing(
    x: Tensor,
    branches: Sequence[Branch],
    plan: MemoryPlan,
    dtype: torch.dtype,
    reversible: bool,
    scales: BranchScales | None = None,
) -> Tensor:
    """As `run_keeping`, with branches computed in chunks: once in forward, again in backward.

    The input of each branch is kept for backward; reversible branches rebuild it from their output and keep nothing.
    Branches draw no random numbers.
    Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Gomez et al. 2017, "The Reversible
    Residual Network"; Kitaev et al. 2020, "Reformer".

    Args:
        dtype: that branches compute in; the streams have x's.
        scales: of each branch's incoming gradient, for float16.
    """
    parameters = list({id(p): p for branch in branches for p in branch.parameters}.values())
    function = _Reversible if reversible else _Checkpointed
    run = _Recomputation(branches, plan, dtype, scales, parameters, torch.is_grad_enabled())
    # `disable` imports the compiler, so it is called only while compiling.
    apply = torch.compiler.disable(function.apply) if torch.compiler.is_compiling() else function.apply
    return apply(x, run, *parameters)


@dataclass(frozen=True)
class _Recomputation:
    """What the two autograd functions share. Parameters are their inputs too, for gradients even if x needs none."""

    branches: Sequence[Branch]
    plan: MemoryPlan
    dtype: torch.dtype
    scales: BranchScales | None
    parameters: list[nn.Parameter]
    grad_enabled: bool

    def reversed_branches(
        self, grads: GradientBuffers, device: torch.device
    ) -> Iterator[tuple[Branch, ComputeWeights]]:
        """Each branch and its weights for backward, from the last to the first."""
        weights = ComputeWeights(self.dtype, grads)
        for index in reversed(range(len(self.branches))):
            scaled = weights if self.scales is None else self.scales.apply(weights, index, device)
            yield self.branches[index], scaled


class _Checkpointed(torch.autograd.Function):
    """One stream; the input of each branch is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Recomputation, *_: Tensor) -> Tensor:
        inputs, ctx.run, weights = [], run, ComputeWeights(run.dtype)
        with without_autocast(x.device):
            for branch in run.branches:
                source, x = x, x.clone()
                branch.add(source, x, weights, run.plan)
                if run.grad_enabled:
                    inputs.append(source)
        ctx.save_for_backward(*inputs)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        run, grad, inputs = ctx.run, grad.clone(), ctx.saved_tensors
        gradients = GradientBuffers(run.plan.grads_in_place)
        with without_autocast(grad.device):
            branches = run.reversed_branches(gradients, grad.device)
            for source, (branch, weights) in zip(reversed(inputs), branches, strict=True):
                grad_x = grad.clone()
                branch.backward(source, None, grad_x, grad, weights, run.plan)
                grad = grad_x
        return grad, None, *gradients.hand_over(run.parameters)


class _Reversible(torch.autograd.Function):
    """Two streams, returned as their mean; backward rebuilds each branch's input from the streams after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Recomputation, *_: Tensor) -> Tensor:
        ctx.run, weights = run, ComputeWeights(run.dtype)
        source, target = x.clone(), x.clone()
        with without_autocast(x.device):
            for branch in run.branches:
                branch.add(source, target, weights, run.plan)
                source, target = target, source
        ctx.streams = (source, target) if run.grad_enabled else None
        return (source + target) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        run = ctx.run
        if ctx.streams is None:
            raise RuntimeError("a second backward through a reversible stack: compute the loss again first")
        (source, target), ctx.streams = ctx.streams, None  # backward overwrites them
        grad_source, grad_target = grad / 2, grad / 2
        gradients = GradientBuffers(run.plan.grads_in_place)
        with without_autocast(grad.device):
            for branch, weights in run.reversed_branches(gradients, grad.device):
                source, target = target, source
                grad_source, grad_target = grad_target, grad_source
                branch.backward(source, target, grad_source, grad_target, weights, run.plan)
        return grad_source + grad_target, None, *gradients.hand_over(run.parameters)


def without_autocast(device: torch.device) -> torch.autocast:
    """Disable autocast: branches choose the dtype of every operation themselves."""
    return torch.autocast(device.type, enabled=False)
