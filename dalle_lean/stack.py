"""Composition of the layers' branches: one residual stream, or two reversible ones.

A branch is (function [B, S, D] -> [B, S, D], the parameters it uses). A stack is a list of (attention, feed-forward).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class BranchCall(NamedTuple):
    """One branch of one layer, ready to be called."""

    run: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]


Stack = Sequence[tuple[BranchCall, BranchCall]]


def run_sequential(x: Tensor, stack: Stack) -> Tensor:
    """x += F(x); x += G(x) for each layer; [B, S, D]."""
    for attention, feed_forward in stack:
        x = x + attention.run(x)
        x = x + feed_forward.run(x)
    return x


def run_reversible_keeping(x: Tensor, stack: Stack) -> Tensor:
    """Two streams a = b = x: a += F(b); b += G(a) for each layer; their mean. Autograd keeps all activations."""
    a = b = x
    for attention, feed_forward in stack:
        a = a + attention.run(b)
        b = b + feed_forward.run(a)
    return (a + b) / 2


def run_reversible(x: Tensor, stack: Stack) -> Tensor:
    """The same function and gradients as `run_reversible_keeping`, but nothing is kept for backward.

    Source: Gomez et al. 2017, "The Reversible Residual Network"; as in Reformer (Kitaev et al. 2020).
    """
    parameters = unique_parameters(stack)
    a, b = _Reversible.apply(x, stack, parameters, *parameters)
    return (a + b) / 2


def unique_parameters(stack: Stack) -> list[nn.Parameter]:
    """Every parameter of the stack once, in order of first use."""
    return list({id(p): p for layer in stack for branch in layer for p in branch.parameters}.values())


class _Reversible(torch.autograd.Function):
    """Streams in, streams out; backward rebuilds each layer's inputs from its outputs.

    Parameters are inputs of the function, so that they get gradients even where x needs none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Stack, parameters: list[nn.Parameter], *_: Tensor) -> tuple[Tensor, Tensor]:
        ctx.stack, ctx.parameters = stack, parameters
        ctx.autocast = _autocast_state(x.device.type)
        a, b = x.clone(), x.clone()
        with ctx.autocast():
            for attention, feed_forward in stack:
                a += attention.run(b)
                b += feed_forward.run(a)
        ctx.save_for_backward(a, b)
        return a.clone(), b.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, b = (stream.clone() for stream in ctx.saved_tensors)
        grad_a, grad_b = grad_a.clone(), grad_b.clone()
        grads: dict[int, Tensor] = {}
        with ctx.autocast():
            for attention, feed_forward in reversed(ctx.stack):
                _undo(feed_forward, source=a, target=b, grad_source=grad_a, grad_target=grad_b, grads=grads)
                _undo(attention, source=b, target=a, grad_source=grad_b, grad_target=grad_a, grads=grads)
        return grad_a + grad_b, None, None, *(grads.get(id(p)) for p in ctx.parameters)


def _undo(
    branch: BranchCall,
    *,
    source: Tensor,
    target: Tensor,
    grad_source: Tensor,
    grad_target: Tensor,
    grads: dict[int, Tensor],
) -> None:
    """Undo `target += branch(source)` in place, and carry the gradient of `target` back through the branch."""
    wanted = [p for p in branch.parameters if p.requires_grad]
    with torch.enable_grad():
        leaf = source.detach().requires_grad_()
        value = branch.run(leaf)
    grad_leaf, *grad_parameters = torch.autograd.grad(value, [leaf, *wanted], grad_target.to(value.dtype))
    target -= value.detach()
    grad_source += grad_leaf
    for parameter, grad in zip(wanted, grad_parameters, strict=True):
        if id(parameter) in grads:
            grads[id(parameter)] += grad
        else:
            grads[id(parameter)] = grad


def _autocast_state(device_type: str) -> Callable[[], torch.autocast]:
    """A way to enter the present autocast again, in backward.

    The cache of cast weights stays off: filled without gradients, it would cut the weights off in the recomputation.
    """
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)
