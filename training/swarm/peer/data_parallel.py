"""A machine with several GPUs is one peer: torchrun starts a process for each of them, and they share its work.

Rank 0 alone speaks with the swarm. It tells the others what to do next; gradients are averaged over all of them before
the swarm sees any, and the weights that come back are handed on.
"""

import os
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dalle_lean import Dalle
from dalle_lean.errors import UserError
from dalle_lean.model.dalle import Crop
from training.data.loader import Batch
from training.step.gradients import GradientComputer
from training.step.learner import Learner

PATIENCE = timedelta(days=1)
"""The others wait for rank 0 while it waits for the swarm."""


class RankCommand(IntEnum):
    """What rank 0 has the others do."""

    LEARN = 1
    """from their next batch, at a step of the schedule"""
    TAKE_WEIGHTS = 2
    REMEMBER = 3
    """their places in the data"""
    STOP = 4


class Ranks:
    """The processes that torchrun has started on this machine; all of them call `share` and `mean` together."""

    def __init__(self, device: torch.device):
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def tell(self, order: RankCommand, step: int = 0) -> None:
        """Rank 0: have the others do this."""
        dist.broadcast(torch.tensor([order, step], device=self.device), src=0)

    def listen(self) -> tuple[RankCommand, int]:
        """The others: what is to be done."""
        said = torch.zeros(2, dtype=torch.int64, device=self.device)
        dist.broadcast(said, src=0)
        order, step = said.tolist()
        return RankCommand(order), step

    def share_text(self, text: str | None) -> str:
        """What rank 0 has said, for all."""
        content = [text]
        dist.broadcast_object_list(content, src=0, device=self.device)
        return str(content[0])

    @torch.no_grad()
    def share(self, model: Dalle) -> None:
        """Rank 0's weights, for all."""
        for parameter in model.parameters():
            dist.broadcast(parameter, src=0)

    @torch.no_grad()
    def mean(self, tensors: list[Tensor]) -> None:
        """Each becomes its mean over all ranks."""
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        torch._foreach_div_(tensors, self.world)

    def close(self) -> None:
        """Part."""
        dist.destroy_process_group()


def open_ranks(device: str) -> Ranks | None:
    """The processes that torchrun has started, None where it has started none but this one. They stay together when
    they are asked for again.

    Args:
        device: "cuda", of which each process takes its own, or "cpu".

    ValueError where they are spread over several machines: each machine is a peer of its own.
    """
    world, here = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if world == 1:
        return None
    if world != here:
        raise UserError(f"{world} processes, {here} of them on this machine: start torchrun for each machine alone")
    place = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=PATIENCE)
    return Ranks(place)


class RankGradients(GradientComputer):
    """Gradients of the batches of all ranks together, which have the same size."""

    def __init__(self, ranks: Ranks, *arguments: Any):
        super().__init__(*arguments)
        self.ranks = ranks

    def accumulate_gradient(self, batch: Batch, crop: Crop | None = None) -> Tensor:
        """As Gradients', where no gradient was there before."""
        loss = super().accumulate_gradient(batch, crop)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.ranks.mean([loss, *gradients])
        return loss


class RankLearner(RankGradients, Learner):
    """Steps with gradients over all ranks; each rank takes the same."""
