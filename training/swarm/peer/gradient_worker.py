"""A process that computes gradients of a run, on its own part of the data."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dalle_lean import Dalle
from dalle_lean.io.files import read_json, write_json
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet
from training.data.loader import Batch, TrainingData
from training.data.sampler import Position
from training.run.draws import crop_of_step
from training.run.processes import ALONE, Processes
from training.run.recipe import MemoryRecipe
from training.step.gradients import GradientComputer
from training.step.learner import Learner
from training.swarm.config import SwarmSettings

POSITION_FILE = "cursor.json"


@dataclass(frozen=True)
class Order:
    """What rank 0 of a peer tells its other processes before each batch."""

    step: int
    """Of the schedule."""
    new_weights: bool
    """Whether the swarm has changed the weights."""


class StepWorker:
    """A process that computes gradients for a run, together with the other processes of its peer.

    Args:
        settings: of the run, with the recipe's complete [model].
        batch_size: samples of this process's share of a batch, computed in `memory.micro_batches` parts.
        memory: this machine's memory plan.
        processes: the processes that share the batches.
    """

    def __init__(
        self,
        settings: SwarmSettings,
        *,
        batch_size: int,
        memory: MemoryRecipe | None = None,
        processes: Processes = ALONE,
    ):
        self.settings, self.batch_size, self.processes = settings, batch_size, processes
        recipe, memory = settings.recipe, memory or settings.recipe.memory
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


class GradientWorker(StepWorker):
    """Rank 0 of a peer, which reads the data.

    Args:
        identity: the peer id, which seeds its order of the data.
        folder: stores its position in the data, from which it continues.
        options: see StepWorker.
    """

    def __init__(
        self,
        settings: SwarmSettings,
        shards: ShardSet,
        tokenizer: Tokenizer,
        *,
        identity: str,
        folder: Path,
        **options: Any,
    ):
        super().__init__(settings, **options)
        self.tokenizer, self.folder, self.position_file = tokenizer, folder, folder / POSITION_FILE
        self.data = TrainingData(shards, settings.recipe.data, identity)

    def batches(
        self, stop_waiting: Callable[[], bool] | None = None
    ) -> AbstractContextManager[Iterator[tuple[Batch, Position]]]:
        """Endless prefetched batches for all processes, from the saved position, each with the position after it."""
        size = self.batch_size * self.processes.world
        batches = self.data.batches(size, self.tokenizer, self.model.config.text_len, self.read_position())
        pin = self.gradients.device.type == "cuda"
        return closing(self.data.ahead(batches, pin=pin, stop_waiting=stop_waiting))

    def read_position(self) -> Position:
        if not self.position_file.exists():
            return Position()
        saved: dict[str, Any] = read_json(self.position_file)
        if any(saved.get(name) != value for name, value in self.order.items()):
            return Position()  # of another run, or in another order
        return Position.from_dict(saved["position"])

    def write_position(self, position: Position) -> None:
        """Save the position; what precedes it is not read again."""
        write_json(self.position_file, {**self.order, "position": position.to_dict()})

    @property
    def order(self) -> dict[str, Any]:
        """What a position depends on. An earlier version may have saved part 0 of 2."""
        return {"run": self.settings.run_id, "identity": self.data.identity, "part": 0, "parts": 1}


def build_model(settings: SwarmSettings) -> Dalle:
    """The run's model with the initial weights of its seed, the same for every peer."""
    torch.manual_seed(settings.recipe.data.seed)
    return Dalle(settings.model)
