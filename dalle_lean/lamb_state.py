"""What LAMB keeps of a parameter between steps: is it whole, and is its master copy up to date."""

from typing import Any

import torch
from torch import Tensor


def follow(state: dict[str, Any], low: Tensor) -> Tensor:
    """The float32 master copy of low-precision weights `low`; it takes their value wherever it does not round to it."""
    master: Tensor | None = state.get("master")
    if master is None:
        master = state["master"] = low.to(torch.float32).contiguous()
        return master
    changed = master.to(low.dtype) != low
    if changed.any():
        torch.where(changed, low.to(torch.float32), master, out=master)
    return master


def check_statistics(state: dict[str, Any], weight: Tensor, block_size: int) -> None:
    """ValueError unless the statistics have the shapes and types of `weight` in blocks of `block_size`."""
    num_blocks = (-(-weight.numel() // block_size),)
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in ("mean", "square"):
        if "mean" in state:
            wanted[name] = (tuple(weight.shape), torch.float32)
        else:
            wanted[f"{name}_codes"] = (tuple(weight.shape), torch.uint8)
            wanted[f"{name}_scales"] = (num_blocks, torch.float32)
    for name, (shape, dtype) in wanted.items():
        found = state.get(name)
        if not (isinstance(found, Tensor) and tuple(found.shape) == shape and found.dtype == dtype):
            kind = f"{list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else "missing"
            raise ValueError(
                f"optimizer state {name} of a parameter of shape {list(weight.shape)} is {kind}; "
                f"with blocks of {block_size} it must be {list(shape)} of {dtype}"
            )
