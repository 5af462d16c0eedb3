"""Composition of the layers' branches: one residual stream or two, and where backward gets activations.

B batch, S positions, D hidden size. A stack is a list of (attention, feed-forward).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dalle_lean.model.branches import LayerBranch
from dalle_lean.model.compute_weights import ComputeWeights, GradientBuffers
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.model.memory_plan import MemoryPlan
from dalle_lean.model.products import PRODUCTS
from dalle_lean.model.recompute import backward_branch, forward_branch

Run = Callable[[Tensor], Tensor]
"""A branch as a function, [B, S, D] -> [B, S, D]."""

Stack = Sequence[tuple[LayerBranch, LayerBranch]]


def run_sequential(x: Tensor, stack: Sequence[tuple[Run, Run]]) -> Tensor:
    """x += F(x); x += G(x) for each layer; [B, S, D]. Autograd keeps all activations."""
    for attend, feed in stack:
        x = x + attend(x)
        x = x + feed(x)
    return x


def run_selective(x: Tensor, stack: Sequence[tuple[Run, Run]]) -> Tensor:
    """The same; autograd keeps the input of each layer and the outputs of its projections, and recomputes the rest."""
    contexts = partial(create_selective_checkpoint_contexts, _keep_projections)
    for layer in stack:
        x = checkpoint(run_sequential, x, [layer], use_reentrant=False, context_fn=contexts)
    return x


def _keep_projections(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def run_reversible_keeping(x: Tensor, stack: Sequence[tuple[Run, Run]]) -> Tensor:
    """Two streams a = b = x: a += F(b); b += G(a) for each layer; their mean. Autograd keeps all activations."""
    a = b = x
    for attend, feed in stack:
        a = a + attend(b)
        b = b + feed(a)
    return (a + b) / 2


def run_recomputing(
    x: Tensor, stack: Stack, plan: MemoryPlan, dtype: torch.dtype, reversible: bool, scales: BranchScales | None = None
) -> Tensor:
    """`run_sequential` or `run_reversible_keeping` with branches computed in chunks: once in forward, again in
    backward. Branches draw no random numbers.

    The input of each branch is kept for backward; a reversible stack rebuilds it from the output and keeps nothing.
    Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Gomez et al. 2017, "The Reversible
    Residual Network"; Kitaev et al. 2020, "Reformer".

    Args:
        dtype: that branches compute in; the streams have x's.
        scales: of each branch's incoming gradient, for float16.
    """
    branches = [branch for layer in stack for branch in layer]
    parameters = list({id(p): p for branch in branches for p in branch.parameters}.values())
    function = _Reversible if reversible else _Checkpointed
    run = _Pass(branches, plan, dtype, scales, parameters, torch.is_grad_enabled())
    # `disable` imports the compiler, so it is called only while compiling.
    apply = torch.compiler.disable(function.apply) if torch.compiler.is_compiling() else function.apply
    return apply(x, run, *parameters)


@dataclass(frozen=True)
class _Pass:
    """What the two autograd functions share. Parameters are among their inputs, to get gradients even if x needs
    none."""

    branches: list[LayerBranch]
    plan: MemoryPlan
    dtype: torch.dtype
    scales: BranchScales | None
    parameters: list[nn.Parameter]
    grad_enabled: bool

    def backward(self, gradients: GradientBuffers, device: torch.device) -> Iterator[tuple[int, ComputeWeights]]:
        """The number and weights of each branch, from the last to the first."""
        weights = ComputeWeights(self.dtype, gradients)
        for index in reversed(range(len(self.branches))):
            yield index, weights if self.scales is None else self.scales.apply(weights, index, device)


class _Checkpointed(torch.autograd.Function):
    """One stream; the input of each branch is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Pass, *_: Tensor) -> Tensor:
        inputs, ctx.run, weights = [], run, ComputeWeights(run.dtype)
        with without_autocast(x.device):
            for branch in run.branches:
                source, x = x, x.clone()
                forward_branch(branch, source, x, weights, run.plan)
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
            for index, weights in run.backward(gradients, grad.device):
                grad_x = grad.clone()
                backward_branch(run.branches[index], inputs[index], None, grad_x, grad, weights, run.plan)
                grad = grad_x
        return grad, None, *gradients.hand_over(run.parameters)


class _Reversible(torch.autograd.Function):
    """Two streams, returned as their mean; backward rebuilds each branch's input from the streams after it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Pass, *_: Tensor) -> Tensor:
        ctx.run, weights = run, ComputeWeights(run.dtype)
        source, target = x.clone(), x.clone()
        with without_autocast(x.device):
            for branch in run.branches:
                forward_branch(branch, source, target, weights, run.plan)
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
            for index, weights in run.backward(gradients, grad.device):
                source, target = target, source
                grad_source, grad_target = grad_target, grad_source
                backward_branch(run.branches[index], source, target, grad_source, grad_target, weights, run.plan)
        return grad_source + grad_target, None, *gradients.hand_over(run.parameters)


def without_autocast(device: torch.device) -> torch.autocast:
    """Disable autocast: branches choose the dtype of every operation themselves."""
    return torch.autocast(device.type, enabled=False)
