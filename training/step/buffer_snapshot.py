"""Taking a step back whose loss or gradient turns out not to be finite."""

from collections.abc import Callable

import torch
from torch import nn


@torch.no_grad()
def remember(module: nn.Module) -> Callable[[], None]:
    """Note what passing data through `module` changes, such as running means; call the result to put it back.

    That is every tensor that takes no gradient; the others change only when an optimizer steps.
    """
    moving = [*module.buffers(), *(weight for weight in module.parameters() if not weight.requires_grad)]
    kept = [tensor.clone() for tensor in moving]

    @torch.no_grad()
    def put_back() -> None:
        for tensor, value in zip(moving, kept, strict=True):
            tensor.copy_(value)

    return put_back
