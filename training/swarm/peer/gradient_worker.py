"""What one process computes of a run: gradients of batches from its part of the data."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from dalle_lean import Dalle
from dalle_lean.io.files import read_json, write_json
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet
from training.data.loader import Batch, TrainingData
from training.data.sampler import Position
from training.run.recipe import MemoryRecipe
from training.run.schedule import crop_of_step
from training.step.gradients import GradientComputer
from training.step.learner import Learner
from training.swarm.config import SwarmSettings
from training.swarm.peer.data_parallel import RankGradients, RankLearner, Ranks

CURSOR = "cursor.json"


class GradientWorker:
    """One process's share of a run's work.

    Args:
        settings: of the run, with the recipe's complete [model].
        shards, tokenizer: the run's.
        identity: of the peer; seeds its order of the data. None on all ranks but 0, which get it from there.
        folder: keeps its place in the data, from which it continues.
        batch_size: samples of a batch, computed in `memory.micro_batches` parts.
        memory: how this machine computes.
        device: without `ranks`, which have their own.
        ranks: the processes of this machine that share the peer's work; None for a single one.
    """

    def __init__(
        self,
        settings: SwarmSettings,
        shards: ShardSet,
        tokenizer: Tokenizer,
        *,
        identity: str | None,
        folder: Path,
        batch_size: int,
        memory: MemoryRecipe | None = None,
        device: str = "cpu",
        ranks: Ranks | None = None,
    ):
        self.settings, self.tokenizer, self.folder, self.ranks = settings, tokenizer, folder, ranks
        self.batch_size = batch_size
        if ranks is not None:
            identity, device = ranks.broadcast_text(identity), str(ranks.device)
        recipe = settings.recipe.data
        self.data = TrainingData(
            shards=shards,
            heldout_share=recipe.heldout_share,
            shuffle_buffer=recipe.shuffle_buffer,
            shuffle_shards=recipe.shuffle_shards,
            seed=recipe.seed,
            identity=identity or "",
            caption_dropout=recipe.caption_dropout,
        )
        if ranks is not None:
            self.data = self.data.split(ranks.rank, ranks.world)
        self.gradients = make_gradients(settings, memory or settings.recipe.memory, batch_size, device, ranks)
        self.rescaled = 0
        """Batches left out because they overflowed in float16; its scales are smaller now."""

    @property
    def model(self) -> Dalle:
        return self.gradients.model

    @property
    def has_inner_steps(self) -> bool:
        """Whether the model changes between two steps of the swarm: in "diloco" mode."""
        return self.settings.wire.mode == "diloco"

    @contextmanager
    def batches(self, stop_waiting: Callable[[], bool] | None = None) -> Iterator[Iterator[tuple[Batch, Position]]]:
        """Endless batches from where the last session stopped, prefetched, each with the position after it."""
        batches = self.data.batches(self.batch_size, self.tokenizer, self.model.config.text_len, self.read_cursor())
        pin = self.gradients.device.type == "cuda"
        with closing(self.data.ahead(batches, pin=pin, stop_waiting=stop_waiting)) as ahead:
            yield ahead

    def learn_from(self, batch: Batch, step: int) -> float:
        """Leave the gradient of the batch's mean loss in the parameters, or take an inner step with it.

        Returns the loss, nan if the gradient was not usable. `step` is the schedule's, from 1.
        """
        recipe = self.settings.recipe
        crop = crop_of_step(step, recipe.schedule.length_warmup, self.model.config.image_side, recipe.data.seed)
        if isinstance(self.gradients, Learner):
            loss, grad_norm, rescaled = self.gradients.step(batch, self.settings.learning_rate(step), crop)
            self.rescaled += rescaled
            return loss if math.isfinite(grad_norm) and not rescaled else math.nan
        loss_nats = self.gradients.accumulate_gradient(batch, crop)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norms = torch.stack([gradient.norm() for gradient in gradients])
        if self.model.scales is not None and not self.model.scales.update():
            self.rescaled += 1
            return math.nan
        return float(loss_nats) if torch.isfinite(norms).all() else math.nan

    @property
    def cursor(self) -> Path:
        """The file that keeps the place in the data."""
        rank = 0 if self.ranks is None else self.ranks.rank
        return self.folder / (CURSOR if rank == 0 else f"cursor-{rank}.json")

    def read_cursor(self) -> Position:
        """Where this process stopped in its data."""
        if not self.cursor.exists():
            return Position()
        saved: dict[str, Any] = read_json(self.cursor)
        if any(saved.get(name) != value for name, value in self.order.items()):
            return Position()  # of another run, or another order
        return Position.from_dict(saved["position"])

    def write_cursor(self, position: Position) -> None:
        """Save the place; what was read before it is not read again."""
        write_json(self.cursor, {**self.order, "position": position.to_dict()})

    @property
    def order(self) -> dict[str, Any]:
        """What a place in the data is relative to."""
        data = self.data
        return {"run": self.settings.run_id, "identity": data.identity, "part": data.part, "parts": data.parts}


def make_gradients(
    settings: SwarmSettings, memory: MemoryRecipe, batch_size: int, device: str, ranks: Ranks | None = None
) -> GradientComputer:
    """What computes gradients of `batch_size` samples; in "diloco" mode it also takes steps."""
    model = build_model(settings).to(device)
    micro_batch_size = -(-batch_size // memory.micro_batches)
    if settings.wire.mode != "diloco":
        if ranks is not None:
            return RankGradients(ranks, model, memory, micro_batch_size)
        return GradientComputer(model, memory, micro_batch_size)
    data = dataclasses.replace(settings.recipe.data, batch_size=micro_batch_size * memory.micro_batches)
    optimizer = dataclasses.replace(settings.recipe.optimizer, delayed=False)  # the weights are also set from outside
    recipe = dataclasses.replace(settings.recipe, memory=memory, data=data, optimizer=optimizer)
    return Learner(model, recipe) if ranks is None else RankLearner(ranks, model, recipe)


def build_model(settings: SwarmSettings) -> Dalle:
    """The run's model with its first weights, the same for every peer."""
    torch.manual_seed(settings.recipe.data.seed)
    return Dalle(settings.model)
