"""The processes of a peer, one for each GPU: they compute gradients of their shares of its batches.

Only rank 0, the Peer, communicates with the swarm and reads data. torch averages the gradients, as in training alone.
"""

import dataclasses
import math
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from dalle_lean import Dalle
from dalle_lean.errors import UserError
from training.data.loader import Batch
from training.run.draws import crop_of_step
from training.run.processes import ALONE, Processes, open_processes
from training.run.recipe import MemoryRecipe
from training.step.gradients import GradientComputer
from training.step.learner import Learner
from training.swarm.config import SwarmSettings, read_settings


@dataclass(frozen=True)
class Work:
    """What rank 0 tells the others before it starts a peer."""

    folder: Path
    """Holds the run's swarm.toml."""
    batch_size: int
    memory: MemoryRecipe


@dataclass(frozen=True)
class Order:
    """What rank 0 tells the others before each batch."""

    step: int
    """Of the schedule."""
    new_weights: bool
    """Whether the swarm has changed the weights."""


class GradientWorker:
    """A process that computes gradients for a run, together with the other processes of its peer.

    Args:
        settings: of the run, with the recipe's complete [model].
        batch_size: samples of this process's share of a batch, computed in `memory.micro_batches` parts.
        memory: this machine's memory plan.
        processes: the processes that share the batches.
    """

    def __init__(self, settings: SwarmSettings, *, batch_size: int, memory: MemoryRecipe, processes: Processes = ALONE):
        self.settings, self.batch_size, self.processes = settings, batch_size, processes
        recipe = settings.recipe
        model = build_model(settings).to(processes.device)
        micro_batch_size = -(-batch_size // memory.micro_batches)
        if self.has_inner_steps:
            data = dataclasses.replace(recipe.data, batch_size=micro_batch_size * memory.micro_batches)
            recipe = dataclasses.replace(recipe, memory=memory, data=data)
            self.gradients: GradientComputer = Learner(model, recipe, processes)
        else:
            self.gradients = GradientComputer(model, memory, micro_batch_size, processes)
        self.rescaled = 0
        """Batches dropped because they overflowed in float16; each one lowers its scales."""

    @property
    def model(self) -> Dalle:
        return self.gradients.model

    @property
    def has_inner_steps(self) -> bool:
        """Whether the model changes between two steps of the swarm: in "diloco" mode."""
        return self.settings.wire.mode == "diloco"

    def follow(self, order: Order, batch: Batch | None = None) -> float:
        """`learn_from` this process's share of a batch, which rank 0 passes."""
        if order.new_weights:
            self.processes.copy_from_first(self.model.parameters())
        return self.learn_from(Batch(*self.processes.share(batch)), order.step)

    def learn_from(self, share: Batch, step: int) -> float:
        """Leave the gradient of the batch's mean loss in the parameters; in "diloco" mode, take an inner step with it.

        Each process passes its share of the batch. Returns the loss of the whole batch in nats, nan if its gradient was
        unusable. `step` counts the schedule's steps from 1.
        """
        recipe = self.settings.recipe
        crop = crop_of_step(step, recipe.schedule.length_warmup, self.model.config.image_side, recipe.data.seed)
        if isinstance(self.gradients, Learner):
            loss, grad_norm, rescaled = self.gradients.step(share, recipe.schedule.learning_rate(step), crop)
            self.rescaled += rescaled
            return loss if math.isfinite(grad_norm) and not rescaled else math.nan
        loss_nats = float(self.gradients.accumulate_gradient(share, crop))
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        finite = math.isfinite(loss_nats) and math.isfinite(torch.nn.utils.get_total_norm(gradients))
        scales = self.model.scales
        if scales is not None and not scales.update(self.processes.any_of_each):
            self.rescaled += finite and not scales.exhausted
            return math.nan
        return loss_nats if finite else math.nan


def open_peer(device: str) -> Processes:
    """The processes that share this peer's work; ValueError if they span several machines: each is its own peer."""
    world, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world != here:
        raise UserError(f"{world} processes, {here} of them on this machine: start torchrun separately on each machine")
    return open_processes(device if world == 1 else device.partition(":")[0])


def run_rank(device: str) -> None:
    """Compute batches for rank 0 until it sends None; a sentence means that it rejoins the run."""
    processes, worker = open_peer(device), None
    told: Work | Order | str | None
    with processes.together():
        while (told := processes.from_first(None)) is not None:
            if isinstance(told, Work):
                leave_signals_to_first()
                settings = read_settings(told.folder)
                worker = GradientWorker(settings, batch_size=told.batch_size, memory=told.memory, processes=processes)
            elif isinstance(told, Order):
                assert worker is not None
                worker.follow(told)
                if not worker.has_inner_steps:
                    worker.model.zero_grad(set_to_none=True)
            else:
                worker = None  # frees its memory until the next Work
                if processes.device.type == "cuda":
                    torch.cuda.empty_cache()
    processes.close()


def leave_signals_to_first() -> None:
    """Only rank 0 handles Ctrl+C and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def build_model(settings: SwarmSettings) -> Dalle:
    """The run's model with the initial weights of its seed, the same for every peer."""
    torch.manual_seed(settings.recipe.data.seed)
    return Dalle(settings.model)
