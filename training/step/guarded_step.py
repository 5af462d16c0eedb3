"""An optimizer step of a CLIP or classifier that changes nothing if loss or gradient is not finite.

The transformer's is `Learner.step`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def guarded_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    *,
    lr: float,
    clip_grad_norm: float,
) -> dict[str, float]:
    """Take a step on the loss that `loss_of` computes -> "loss", "grad_norm" (before clipping) and "lr". If one is not
    finite, nothing changes."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    model.train()
    restore = snapshot(model)
    loss = loss_of()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    numbers = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}
    if all(math.isfinite(number) for number in numbers.values()):
        optimizer.step()
    else:
        restore()
    model.eval()
    return numbers


@torch.no_grad()
def snapshot(module: nn.Module) -> Callable[[], None]:
    """Copy what a forward pass may change, such as running means; calling the result restores it.

    These are the buffers and frozen parameters: the other parameters change only in the optimizer's step.
    """
    tensors = [*module.buffers(), *(weight for weight in module.parameters() if not weight.requires_grad)]
    copies = [tensor.clone() for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for tensor, value in zip(tensors, copies, strict=True):
            tensor.copy_(value)

    return restore
