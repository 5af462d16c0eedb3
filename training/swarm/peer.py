"""One peer's walk: gradients on its own data, steps with all the others."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hivemind
import torch
from torch import Tensor

from dalle_lean import Dalle, DalleConfig
from dalle_lean.files import read_json, write_json
from dalle_lean.tokenizer import Tokenizer
from training.data import Batch, TrainingData, collate, drop_captions
from training.gradients import Gradients
from training.heldout import heldout_rows
from training.interrupt import interrupt_deferred
from training.order import Position
from training.progress import OnNotice
from training.recipe import MemoryRecipe
from training.retry import silent
from training.schedule import crop_of_step
from training.shard_set import ShardSet
from training.swarm.averagers import StateRefused
from training.swarm.optimizer import swarm_optimizer
from training.swarm.settings import SwarmSettings

CURSOR = "cursor.json"
JUDGE_SAMPLES = 64
WORST_RATIO = 1.2
"""A downloaded state may be so much worse than one's own on held-out samples, chance included."""
POLL_S = 0.5


@dataclass
class Contribution:
    """What a peer has done and met so far, for itself and for the run's metrics."""

    epoch: int = 0
    """Steps of the swarm."""
    loss: float = math.nan
    """Mean over this peer's samples since the step before, in nats."""
    samples: int = 0
    samples_per_s: float = 0.0
    dropped_batches: int = 0
    """Their loss or gradient was not finite."""
    dropped_tensors: int = 0
    """Averages from others that were not finite."""
    skipped_steps: int = 0
    """Averaged gradients that were not finite."""
    resyncs: int = 0
    """Downloads of the state."""


class Peer:
    """A trainer of a run.

    Args:
        settings: of the run; its recipe's [model] is complete.
        dht: this machine's node.
        shards, tokenizer: the run's.
        folder: where this peer keeps its place in the data; it goes on from there.
        batch_size: samples between two reports to the others; `memory.micro_batches` parts are computed after each
            other.
        memory: how this machine computes.
        on_step: called after each step of the swarm, and with each batch, with what was done.
        on_download: see SwarmStateAverager.
    """

    def __init__(
        self,
        settings: SwarmSettings,
        dht: hivemind.DHT,
        shards: ShardSet,
        tokenizer: Tokenizer,
        *,
        folder: Path,
        batch_size: int,
        memory: MemoryRecipe | None = None,
        device: str = "cpu",
        on_step: Callable[["Peer", Contribution], None] | None = None,
        on_download: Callable[[int, int, str], None] | None = None,
        on_notice: OnNotice = silent,
    ):
        recipe = settings.recipe
        self.settings, self.dht, self.tokenizer, self.folder = settings, dht, tokenizer, folder
        self.batch_size, self.on_step, self.on_notice = batch_size, on_step, on_notice
        self.data = TrainingData(
            shards=shards,
            heldout_share=recipe.data.heldout_share,
            shuffle_buffer=recipe.data.shuffle_buffer,
            shuffle_shards=recipe.data.shuffle_shards,
            seed=recipe.data.seed,
            identity=dht.peer_id.to_base58(),
        )
        memory = memory or recipe.memory
        self.gradients = Gradients(build_model(settings).to(device), memory, -(-batch_size // memory.micro_batches))
        rows = heldout_rows(shards, recipe.data.heldout_share, min(JUDGE_SAMPLES, recipe.data.heldout_samples))
        self.heldout = collate(rows, tokenizer, self.model.config.text_len) if len(rows) else None
        self.done = Contribution()
        self.optimizer = swarm_optimizer(settings, self.model, dht, judge=self.judge, on_download=on_download)

    @property
    def model(self) -> Dalle:
        return self.gradients.model

    @property
    def finished(self) -> bool:
        """Whether the schedule is at its end."""
        return self.optimizer.local_epoch * self.settings.steps_per_epoch >= self.settings.total_steps

    def judge(self, parameters: Sequence[Tensor]) -> None:
        """StateRefused where held-out samples say that these parameters are much worse than the present ones."""
        if self.heldout is None:
            return
        own = list(self.optimizer_parameters())
        before = self.gradients.measure(self.heldout)["heldout_loss"]
        kept = [parameter.detach().clone() for parameter in own]
        try:
            copy_all(own, parameters)
            after = self.gradients.measure(self.heldout)["heldout_loss"]
        finally:
            copy_all(own, kept)
        if not after <= WORST_RATIO * before:
            raise StateRefused(f"has a held-out loss of {after:.3g}, the present weights {before:.3g}")

    def optimizer_parameters(self) -> Sequence[Tensor]:
        """The model's parameters in the order of the averagers."""
        parameters: Sequence[Tensor] = self.optimizer.state_averager.main_parameters
        return parameters

    def go(self) -> None:
        """Train until the schedule ends or Ctrl+C; then leave cleanly.

        Raises OutOfSync where the state of the others cannot be had.
        """
        try:
            with interrupt_deferred(self.on_notice) as interrupted:
                self.wait_for_peers(interrupted)
                self.catch_up()
                self.learn(interrupted)
                if interrupted():
                    raise KeyboardInterrupt
        finally:
            self.leave()

    def wait_for_peers(self, interrupted: Callable[[], bool]) -> None:
        """The barrier before the first step: alone, hivemind would run ahead and then wait for the others in vain."""

    def catch_up(self) -> None:
        """Take the state of a run that is under way."""
        if self.optimizer.tracker.global_epoch > self.optimizer.local_epoch:
            self.optimizer.load_state_from_peers()
            self.done.resyncs += 1

    def learn(self, interrupted: Callable[[], bool]) -> None:
        """Batch after batch."""
        batches = self.data.batches(self.batch_size, self.tokenizer, self.model.config.text_len, self.read_cursor())
        pin = self.gradients.device.type == "cuda"
        with closing(self.data.ahead(batches, pin=pin, stop_waiting=interrupted)) as ahead:
            losses: list[float] = []
            for batch, position in ahead:
                if interrupted() or self.finished:
                    return
                self.take(batch, position, losses)

    def take(self, batch: Batch, position: Position, losses: list[float]) -> None:
        """Add a batch's gradient to the swarm's next step, unless it is not finite."""
        epoch, started = self.optimizer.local_epoch, time.perf_counter()
        loss = self.compute(batch, epoch)
        if math.isfinite(loss):
            losses.append(loss)
            self.done.samples += len(batch.text_ids)
            self.optimizer.step(batch_size=len(batch.text_ids))
        else:
            self.done.dropped_batches += 1
            self.optimizer.step(batch_size=0)
        self.optimizer.zero_grad()
        if self.optimizer.opt.failure is not None:
            raise self.optimizer.opt.failure
        self.done.samples_per_s = len(batch.text_ids) / (time.perf_counter() - started)
        if self.optimizer.local_epoch != epoch:
            self.done.loss = sum(losses) / len(losses) if losses else math.nan
            losses.clear()
            self.write_cursor(position)
        self.tell()

    def compute(self, batch: Batch, epoch: int) -> float:
        """Leave the gradient of the batch's mean loss in the parameters; returns the loss, nan where either is not
        finite."""
        step, recipe = epoch * self.settings.steps_per_epoch + 1, self.settings.recipe
        batch = drop_captions(batch, recipe.data.caption_dropout, seed=recipe.data.seed, step=step)
        crop = crop_of_step(step, recipe.schedule.length_warmup, self.model.config.image_side, recipe.data.seed)
        loss = self.gradients.accumulate_gradient(batch, crop)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norms = torch.stack([gradient.norm() for gradient in gradients])
        return float(loss) if torch.isfinite(norms).all() else math.nan

    def tell(self) -> None:
        """Bring the numbers up to date and show them."""
        self.done.epoch = self.optimizer.local_epoch
        self.done.dropped_tensors = (
            self.optimizer.state_averager.dropped_tensors + self.optimizer.grad_averager.dropped_tensors
        )
        self.done.skipped_steps = self.optimizer.opt.skipped_steps
        if self.on_step is not None:
            self.on_step(self, self.done)

    def read_cursor(self) -> Position:
        """Where this peer stopped in its data."""
        path = self.folder / CURSOR
        if not path.exists():
            return Position()
        saved: dict[str, Any] = read_json(path)
        if saved["run"] != self.settings.run_id or saved["identity"] != self.data.identity:
            return Position()  # another run's, or another peer's order
        return Position.from_dict(saved["position"])

    def write_cursor(self, position: Position) -> None:
        """Remember the place; what was read before it will not be read again."""
        content = {"run": self.settings.run_id, "identity": self.data.identity, "position": position.to_dict()}
        write_json(self.folder / CURSOR, content)

    def leave(self) -> None:
        """Say goodbye; the swarm goes on."""
        self.optimizer.shutdown()


def build_model(settings: SwarmSettings) -> Dalle:
    """The run's model with its first weights, the same for every peer."""
    torch.manual_seed(settings.recipe.data.seed)
    return Dalle(DalleConfig.from_dict(settings.recipe.model))


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each source into its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
