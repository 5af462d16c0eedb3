"""LAMB's state of a parameter: its checks, and the float32 master copy of the weights."""

from typing import Any

import torch
from torch import Tensor

from dalle_lean.errors import UserError


def sync_master(state: dict[str, Any], low: Tensor) -> Tensor:
    """The float32 master copy of low-precision weights `low`, set to their value wherever it does not round to it."""
    master: Tensor | None = state.get("master")
    if master is None:
        master = state["master"] = low.to(torch.float32).contiguous()
        return master
    changed = master.to(low.dtype) != low
    if changed.any():
        torch.where(changed, low.to(torch.float32), master, out=master)
    return master


def check_state(state: dict[str, Any], parameter: Tensor, block_size: int) -> None:
    """ValueError names what in the state does not fit `parameter` with blocks of `block_size`.

    The state holds `step`, the number of steps taken; the two averages, in float32 or as codes and scales; and, if
    there is one, the float32 `master` copy of the weights.
    """
    owner = f"of a parameter of shape {list(parameter.shape)}"
    step = state.get("step")
    if type(step) is not int or step < 0:
        found = repr(step) if "step" in state else "missing"
        raise UserError(f"optimizer state step {owner} is {found}; it must be a whole number, at least 0")
    for name, (shape, dtype) in expected_tensors(state, parameter, block_size).items():
        value = state.get(name)
        if not (isinstance(value, Tensor) and tuple(value.shape) == shape and value.dtype == dtype):
            found = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else "missing"
            raise UserError(
                f"optimizer state {name} {owner} is {found}; "
                f"with blocks of {block_size} it must be {list(shape)} of {dtype}"
            )


def expected_tensors(
    state: dict[str, Any], parameter: Tensor, block_size: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor that a state of this kind must hold."""
    shape = tuple(parameter.shape)
    tensors = {}
    for name in ("mean", "square"):
        if "mean" in state:
            tensors[name] = (shape, torch.float32)
        else:
            tensors[f"{name}_codes"] = (shape, torch.uint8)
            tensors[f"{name}_scales"] = ((-(-parameter.numel() // block_size),), torch.float32)
    if "master" in state:
        tensors["master"] = (shape, torch.float32)
    return tensors
