"""State dicts of tensors sharded over processes <-> state dicts of whole tensors."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensors(value: Any, keep: bool) -> Any:
    """A state dict with its sharded tensors gathered on the CPU; all processes call it, and those without `keep` get
    None in their place."""
    if isinstance(value, dict):
        return {name: full_tensors(part, keep) for name, part in value.items()}
    if not isinstance(value, DTensor):
        return value
    tensor = value.full_tensor()
    return tensor.cpu() if keep else None


def sharded_like(value: Any, like: Any) -> Any:
    """Shard a whole tensor like `like`, if that is sharded and has its shape; return anything else unchanged."""
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    # Every process has the whole tensor: nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def sharded_optimizer_state(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Shard an optimizer's state dict like the parameters of its groups."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    sharded = {
        number: {name: sharded_like(value, parameters[number]) for name, value in statistics.items()}
        for number, statistics in state["state"].items()
        if number < len(parameters)
    }
    return {**state, "state": {**state["state"], **sharded}}
