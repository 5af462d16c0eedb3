"""LAMB for parameters that FSDP2 shards over processes: each updates its shard by the norms of the whole tensor."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a shard of the tensor."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_state(state: dict[str, Any]) -> dict[str, Any]:
    """This process's shards of a parameter's state, in the same memory."""
    return {name: local(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def all_reduce_sum(parameter: Tensor) -> Callable[[list[float]], list[float]]:
    """A function that sums numbers over the processes with a shard of the parameter; the identity if it is whole."""
    if not isinstance(parameter, DTensor):
        return list

    def total(numbers: list[float]) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float64, device=parameter.device)
        dist.all_reduce(sums, group=parameter.device_mesh.get_group())
        return sums.tolist()

    return total
