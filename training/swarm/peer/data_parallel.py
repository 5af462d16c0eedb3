"""A machine with several GPUs is one peer: torchrun starts one process per GPU, and they share its work.

Only rank 0 talks to the swarm. It sends the others commands; gradients are averaged over all ranks before the swarm
sees them, and the weights that come back are broadcast.
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

RANK_TIMEOUT = timedelta(days=1)
"""The other ranks wait for rank 0 while it waits for the swarm."""


class RankCommand(IntEnum):
    """What rank 0 sends to the others."""

    LEARN = 1
    """From their next batch, at a step of the schedule."""
    RECEIVE_WEIGHTS = 2
    SAVE_CURSOR = 3
    """Their places in the data."""
    STOP = 4


class Ranks:
    """The processes that torchrun started on this machine; all of them call `broadcast` and `mean` together."""

    def __init__(self, device: torch.device):
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def send(self, command: RankCommand, step: int = 0) -> None:
        """On rank 0: send the others a command."""
        dist.broadcast(torch.tensor([command, step], device=self.device), src=0)

    def receive(self) -> tuple[RankCommand, int]:
        """On the others: the next command."""
        message = torch.zeros(2, dtype=torch.int64, device=self.device)
        dist.broadcast(message, src=0)
        command, step = message.tolist()
        return RankCommand(command), step

    def broadcast_text(self, text: str | None) -> str:
        """Rank 0's text, on all ranks."""
        content = [text]
        dist.broadcast_object_list(content, src=0, device=self.device)
        return str(content[0])

    @torch.no_grad()
    def broadcast(self, model: Dalle) -> None:
        """Rank 0's weights, on all ranks."""
        for parameter in model.parameters():
            dist.broadcast(parameter, src=0)

    @torch.no_grad()
    def mean(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its mean over all ranks."""
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        torch._foreach_div_(tensors, self.world)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def open_ranks(device: str) -> Ranks | None:
    """The processes that torchrun started, None if there is only this one. May be called again.

    Args:
        device: "cuda", of which each process takes its own, or "cpu".

    ValueError if they are on several machines: each machine is a separate peer.
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
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=RANK_TIMEOUT)
    return Ranks(place)


class RankGradients(GradientComputer):
    """Gradients over the batches of all ranks, which have the same size."""

    def __init__(self, ranks: Ranks, *arguments: Any):
        super().__init__(*arguments)
        self.ranks = ranks

    def accumulate_gradient(self, batch: Batch, crop: Crop | None = None) -> Tensor:
        """As GradientComputer's, on top of no earlier gradient."""
        loss = super().accumulate_gradient(batch, crop)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.ranks.mean([loss, *gradients])
        return loss


class RankLearner(RankGradients, Learner):
    """Steps with gradients over all ranks; each rank takes the same step."""
