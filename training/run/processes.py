"""The processes that torchrun started to train one model together, on one machine or several."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dalle_lean.errors import UserError

T = TypeVar("T")
TIMEOUT = timedelta(days=1)
"""The others wait while the first process waits for data or for the peers of a swarm."""


@dataclass(frozen=True)
class Processes:
    """This process among the `world` that train together; all of them call the same methods in the same order."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Of this process."""
    rank: int = 0
    world: int = 1
    local_world: int = 1
    """Number of them on this machine."""

    @property
    def first(self) -> bool:
        """Whether this is the process that reads the data and writes the files."""
        return self.rank == 0

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.any_of_each(torch.tensor(flag)))

    def any_of_each(self, flags: Tensor) -> Tensor:
        """Whether each of the flags (bool) is set in any process."""
        if self.world == 1:
            return flags
        numbers = flags.int()
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.bool()

    def mean(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value)
            value /= self.world
        return value

    def from_first(self, value: T) -> T:
        """Broadcast the first process's value; the others' are ignored."""
        if self.world == 1:
            return value
        values = [value]
        # On the CPU: the values are small, and no GPU has to synchronize.
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def share(self, tensors: Sequence[Tensor] | None) -> list[Tensor]:
        """Scatter the first process's tensors [n, ...] on the CPU, in order of rank: n / world rows to each."""
        specs = self.from_first([(tensor.shape, tensor.dtype) for tensor in tensors or ()])
        if self.world == 1:
            return list(tensors or ())
        shares = []
        for index, (shape, dtype) in enumerate(specs):
            shares.append(torch.empty(shape[0] // self.world, *shape[1:], dtype=dtype))
            parts = list(tensors[index].contiguous().chunk(self.world)) if tensors else None
            dist.scatter(shares[-1], parts, src=0)
        return shares

    @torch.no_grad()
    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite the tensors, such as weights, with the first process's."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise UserError if communication fails because another process has ended."""
        try:
            yield
        except RuntimeError as failure:
            if self.world == 1 or not (isinstance(failure, dist.DistError) or "by peer" in str(failure)):
                raise
            raise UserError("another of the processes has ended; its own message says why") from None

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


ALONE = Processes()


def open_processes(device: str) -> Processes:
    """The processes that torchrun started, or this one alone; may be called again.

    Args:
        device: "cuda", where each of several processes takes its own GPU, or "cpu"; one process alone may name a GPU.

    Raises:
        UserError: several processes cannot share the device.
    """
    world, place = int(os.environ.get("WORLD_SIZE", 1)), torch.device(device)
    if world == 1:
        return Processes(place)
    if place.type not in ("cpu", "cuda") or place.index is not None:
        raise UserError(
            f"{world} processes cannot share {device}: give --device cuda, one GPU for each, or --device cpu"
        )
    if place.type == "cuda":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo", timeout=TIMEOUT)
    return Processes(place, dist.get_rank(), world, local_world=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
