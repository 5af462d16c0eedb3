"""Cross-entropy that need not hold all logits, and the embedding lookup, whose weight is the output layer's.

Positions come in sections (text, image), and each predicts its own rows of the vocabulary. So a section's logits and
softmax cover its rows only.

B batch, S positions, s positions of a section, D hidden size, V rows of the vocabulary, v rows of a section.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, embedding

from dalle_lean.model.compute_weights import IN_PLACE_DTYPES, GradientBuffers
from dalle_lean.model.memory_plan import MemoryPlan, ranges
from dalle_lean.model.products import linear


class Section(NamedTuple):
    """Positions that predict ids of one part of the vocabulary."""

    positions: slice
    rows: slice
    targets: Tensor  # [B, s], counted from the section's first row


def section_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor, sections: Sequence[Section], dtype: torch.dtype, plan: MemoryPlan
) -> Tensor:
    """Mean cross-entropy in nats of each section, [number of sections], float32 or wider.

    Args:
        hidden: [B, S, D]; weight: [V, D]; bias: [V].
        dtype: of the product that gives the logits; their softmax is at least float32.
        plan: its loss_tokens limits the tokens whose logits exist at once, recomputed in backward; None keeps all.
    """
    if plan.loss_tokens is not None or dtype == torch.float16:  # plain backward would round small factors to zero
        return _SectionLosses.apply(hidden, weight, bias, sections, dtype, plan)
    losses = []
    for section in sections:
        logits = _logits(hidden[:, section.positions], weight[section.rows].to(dtype), bias[section.rows].to(dtype))
        losses.append(cross_entropy(logits.flatten(0, 1), section.targets.flatten()))
    return torch.stack(losses)


class _SectionLosses(torch.autograd.Function):
    """The same in chunks of tokens; nothing as large as the logits is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        sections: Sequence[Section],
        dtype: torch.dtype,
        plan: MemoryPlan,
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        # Not by save_for_backward, which may return another tensor than the parameter whose .grad is added to.
        ctx.weight, ctx.bias, ctx.sections, ctx.dtype, ctx.plan = weight, bias, sections, dtype, plan
        losses = []
        for section in sections:
            rows = weight[section.rows].to(dtype), bias[section.rows].to(dtype)
            nats = [
                cross_entropy(_logits(h.flatten(0, 1), *rows), targets.flatten(), reduction="sum")
                for h, targets in _chunks(hidden, section, plan)
            ]
            losses.append(torch.stack(nats).sum() / section.targets.numel())
        return torch.stack(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (hidden,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        gradients = GradientBuffers(ctx.plan.grads_in_place)
        weight_grad, bias_grad = gradients.of(weight), gradients.of(bias)
        grad_hidden = torch.zeros_like(hidden)
        for section, grad_of_loss in zip(ctx.sections, grad, strict=True):
            rows = weight[section.rows].to(ctx.dtype), bias[section.rows].to(ctx.dtype)
            factor = grad_of_loss / section.targets.numel()  # a tensor: nothing waits for the device
            grads = _chunks(grad_hidden, section, ctx.plan)
            for (h, targets), (grad_h, _) in zip(_chunks(hidden, section, ctx.plan), grads, strict=True):
                # The factor is applied last: without it the entries are at most 1, which float16 can hold.
                h, targets = h.flatten(0, 1), targets.flatten()
                grad_logits = _logits(h, *rows)
                grad_logits.sub_(grad_logits.logsumexp(dim=-1, keepdim=True)).exp_()
                grad_logits[torch.arange(len(targets), device=targets.device), targets] -= 1
                narrow = grad_logits.to(ctx.dtype)
                grad_h.addcmul_(linear(narrow, rows[0].t()).view(grad_h.shape), factor)
                if weight_grad is not None:
                    add_scaled_product(weight_grad[section.rows], narrow.t(), h.to(ctx.dtype), factor)
                if bias_grad is not None:
                    bias_grad[section.rows].addcmul_(grad_logits.sum(0), factor)
                del grad_logits, narrow  # before the next chunk's are made
        return grad_hidden, *gradients.hand_over([weight, bias]), None, None, None


def add_scaled_product(buffer: Tensor, left: Tensor, right: Tensor, factor: Tensor) -> None:
    """buffer += factor * left @ right, without a temporary of its size where the dtypes agree; `factor` is a scalar."""
    if buffer.dtype == left.dtype:
        buffer.addmm_(left, right * factor)
    else:
        buffer.addcmul_(left @ right, factor)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """hidden [..., D] -> [..., v], multiplied in the dtype of the section's rows, then at least float32."""
    logits = linear(hidden.to(weight.dtype), weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _chunks(hidden: Tensor, section: Section, plan: MemoryPlan) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of a section's part of [B, S, D], [b, s, D], with their targets, [b, s]: b * s is at most loss_tokens."""
    hidden = hidden[:, section.positions]
    batch, length = section.targets.shape
    for samples in ranges(batch, max(1, (plan.loss_tokens or batch * length) // length)):
        for tokens in ranges(length, plan.loss_tokens):
            yield hidden[samples, tokens], section.targets[samples, tokens]


def embed(ids: Tensor, weight: Tensor, plan: MemoryPlan) -> Tensor:
    """Rows of `weight` [V, D] by ids [B, S] -> [B, S, D]; a gradient in place needs no second [V, D]."""
    if plan.grads_in_place and weight.dtype in IN_PLACE_DTYPES and torch.is_grad_enabled():
        return _Embed.apply(ids, weight)
    return embedding(ids, weight)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        if (buffer := GradientBuffers(in_place=True).of(ctx.weight)) is not None:
            buffer.index_add_(0, ids.flatten(), grad.flatten(0, 1).to(buffer.dtype))
        return None, None
