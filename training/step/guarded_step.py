"""An optimizer step that changes nothing where its loss or gradient is not finite: of a CLIP or a classifier.

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
    """Learn from `loss_of`, which calls the model -> loss, norm of the gradient before clipping ("grad_norm") and
    learning rate ("lr"). Where one is not finite, nothing is changed."""
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
    """Copy what a forward pass through `module` may change, such as running means; the result puts it back.

    That is every tensor that takes no gradient; the others change only when an optimizer steps.
    """
    tensors = [*module.buffers(), *(weight for weight in module.parameters() if not weight.requires_grad)]
    copies = [tensor.clone() for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for tensor, value in zip(tensors, copies, strict=True):
            tensor.copy_(value)

    return restore
