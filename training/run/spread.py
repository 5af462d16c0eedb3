"""State dicts of tensors that are spread over processes <-> those of one process."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(value: Any, keep: bool) -> Any:
    """A state dict with whole tensors on the CPU in place of spread ones; all processes call it, and those without
    `keep` get None for them."""
    if isinstance(value, dict):
        return {name: whole(part, keep) for name, part in value.items()}
    if not isinstance(value, DTensor):
        return value
    tensor = value.full_tensor()
    return tensor.cpu() if keep else None


def spread_as(value: Any, like: Any) -> Any:
    """A whole tensor spread as `like` is, if that is spread and of its shape; anything else as it is."""
    if not (isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    # Every process has the whole: nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def spread_statistics(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """An optimizer's state dict for the parameters of its groups, as they are spread."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    spread = {
        number: {name: spread_as(value, parameters[number]) for name, value in statistics.items()}
        for number, statistics in state["state"].items()
        if number < len(parameters)
    }
    return {**state, "state": {**state["state"], **spread}}
