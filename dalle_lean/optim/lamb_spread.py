"""LAMB's parameters that are spread over processes, as FSDP2 does: each steps its shard by the norms of the whole."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_spread(tensor: Tensor) -> bool:
    """Whether this process has only a shard of the tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_state(state: dict[str, Any]) -> dict[str, Any]:
    """What this process has of a parameter's state, in the same memory."""
    return {name: local(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def total_over(parameter: Tensor) -> Callable[[list[float]], list[float]]:
    """The sum of numbers over the processes that share the parameter; alone, the numbers themselves."""
    if not isinstance(parameter, DTensor):
        return list

    def total(numbers: list[float]) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float64, device=parameter.device)
        dist.all_reduce(sums, group=parameter.device_mesh.get_group())
        totals: list[float] = sums.tolist()
        return totals

    return total
