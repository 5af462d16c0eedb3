"""One peer's walk: gradients on its own data, steps with all the others."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.utils import get_dht_time
from torch import Tensor

from dalle_lean import Dalle, DalleConfig
from dalle_lean.files import read_json, write_json
from dalle_lean.model import Crop
from dalle_lean.tokenizer import Tokenizer
from training.data import Batch, TrainingData, collate, drop_captions
from training.gradients import Gradients
from training.heldout import heldout_rows
from training.interrupt import interrupt_deferred
from training.learner import Learner
from training.order import Position
from training.progress import OnNotice
from training.recipe import MemoryRecipe
from training.retry import silent
from training.schedule import crop_of_step, learning_rate
from training.shard_set import ShardSet
from training.swarm.averagers import StateRefused
from training.swarm.optimizer import swarm_optimizer
from training.swarm.settings import SwarmSettings

CURSOR = "cursor.json"
JUDGE_SAMPLES = 64
WORST_RATIO = 1.2
"""A downloaded state may be so much worse than one's own on held-out samples, chance included."""
POLL_S = 0.5
PRESENCE_S = 10.0
"""So long a trainer that waits at the barrier counts as being there."""


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
    lonely_steps: int = 0
    """Steps for which no average could be had although others are there: taken with one's own gradients."""
    rescaled: int = 0
    """Batches left out because float16 overflowed in them; its scales are smaller now."""
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
        self.gradients = make_gradients(settings, memory, batch_size, device)
        rows = heldout_rows(shards, recipe.data.heldout_share, min(JUDGE_SAMPLES, recipe.data.heldout_samples))
        self.heldout = collate(rows, tokenizer, self.model.config.text_len) if len(rows) else None
        self.done = Contribution()
        self.on_download, self.interrupted = on_download, never
        self.optimizer = swarm_optimizer(
            settings, self.model, dht, judge=self.judge, on_download=self.show_download, on_notice=self.on_notice
        )

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
        if not (after <= WORST_RATIO * before or (math.isfinite(after) and not math.isfinite(before))):
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
                self.interrupted = interrupted
                self.wait_for_peers(interrupted)
                self.catch_up()
                self.learn(interrupted)
                if interrupted():
                    raise KeyboardInterrupt
        finally:
            self.leave()

    def show_download(self, received: int, total: int, donor: str) -> None:
        """Tell how far a download of the state is; KeyboardInterrupt once Ctrl+C was pressed."""
        if self.interrupted():
            raise KeyboardInterrupt
        if self.on_download is not None:
            self.on_download(received, total, donor)

    def wait_for_peers(self, interrupted: Callable[[], bool]) -> None:
        """The barrier before the first step: alone, hivemind would run ahead and then wait for the others in vain."""
        least, before = self.settings.swarm.min_peers, -1
        key = f"{self.settings.run_id}_waiting"
        while least > 1 and not interrupted() and not self.under_way:
            expiration = get_dht_time() + PRESENCE_S
            self.dht.store(key, subkey=self.dht.peer_id.to_bytes(), value=True, expiration_time=expiration)
            found = self.dht.get(key, latest=True)
            here = len(found.value) if found is not None and isinstance(found.value, dict) else 0
            if here >= least:
                return
            if here != before:
                self.on_notice(f"{here} of {least} trainers are here; waiting for {least - here} more")
                before = here
            time.sleep(POLL_S)

    @property
    def under_way(self) -> bool:
        """Whether others train already."""
        progress = self.optimizer.tracker.global_progress
        return bool(progress.epoch > 0 or progress.samples_accumulated > 0)

    def catch_up(self) -> None:
        """Take the state of a run that is under way."""
        if self.optimizer.tracker.global_epoch > self.optimizer.local_epoch:
            self.optimizer.load_state_from_peers()

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
        before = self.done.rescaled
        loss = self.compute(batch, epoch)
        rescaled = self.done.rescaled > before
        if math.isfinite(loss):
            losses.append(loss)
            self.done.samples += len(batch.text_ids)
            self.optimizer.step(batch_size=len(batch.text_ids))
        else:
            self.done.dropped_batches += not rescaled
            self.optimizer.step(batch_size=0)
        if not self.takes_own_steps:
            self.optimizer.zero_grad()
        self.done.samples_per_s = len(batch.text_ids) / (time.perf_counter() - started)
        if self.optimizer.local_epoch != epoch:
            self.done.loss = sum(losses) / len(losses) if losses else math.nan
            losses.clear()
            self.write_cursor(position)
        self.tell()

    def compute(self, batch: Batch, epoch: int) -> float:
        """Leave the gradient of the batch's mean loss in the parameters, or take a step of one's own with it; returns
        the loss, nan where either is not finite."""
        recipe = self.settings.recipe
        step = self.optimizer.inner_step(recipe.data.batch_size) if self.takes_own_steps else epoch + 1
        batch = drop_captions(batch, recipe.data.caption_dropout, seed=recipe.data.seed, step=step)
        crop = crop_of_step(step, recipe.schedule.length_warmup, self.model.config.image_side, recipe.data.seed)
        if isinstance(self.gradients, Learner):
            return self.learn_alone(self.gradients, batch, step, crop)
        loss = self.gradients.accumulate_gradient(batch, crop)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norms = torch.stack([gradient.norm() for gradient in gradients])
        if self.model.scales is not None and not self.model.scales.update():
            self.done.rescaled += 1
            return math.nan
        return float(loss) if torch.isfinite(norms).all() else math.nan

    def learn_alone(self, learner: Learner, batch: Batch, step: int, crop: Crop | None) -> float:
        """Take a step of one's own; returns the loss, nan where it was not taken."""
        schedule = self.settings.recipe.schedule
        lr = learning_rate(
            step, peak=schedule.peak_lr, warmup_steps=schedule.warmup_steps, total_steps=schedule.total_steps
        )
        loss, grad_norm, rescaled = learner.step(batch, lr, crop)
        self.done.rescaled += rescaled
        return loss if math.isfinite(grad_norm) and not rescaled else math.nan

    @property
    def takes_own_steps(self) -> bool:
        """Whether the model moves between two steps of the swarm: "diloco"."""
        return self.settings.wire.mode == "diloco"

    def tell(self) -> None:
        """Bring the numbers up to date and show them."""
        self.done.epoch = self.optimizer.local_epoch
        self.done.dropped_tensors = (
            self.optimizer.state_averager.dropped_tensors + self.optimizer.grad_averager.dropped_tensors
        )
        self.done.skipped_steps = self.optimizer.opt.skipped_steps
        self.done.lonely_steps, self.done.resyncs = self.optimizer.lonely_steps, self.optimizer.resyncs
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


def make_gradients(settings: SwarmSettings, memory: MemoryRecipe, batch_size: int, device: str) -> Gradients:
    """What computes gradients of `batch_size` samples; in "diloco" mode it takes steps, too."""
    model = build_model(settings).to(device)
    micro_batch_size = -(-batch_size // memory.micro_batches)
    if settings.wire.mode != "diloco":
        return Gradients(model, memory, micro_batch_size)
    data = dataclasses.replace(settings.recipe.data, batch_size=micro_batch_size * memory.micro_batches)
    optimizer = dataclasses.replace(settings.recipe.optimizer, delayed=False)  # the weights are set from outside
    return Learner(model, dataclasses.replace(settings.recipe, memory=memory, data=data, optimizer=optimizer))


def build_model(settings: SwarmSettings) -> Dalle:
    """The run's model with its first weights, the same for every peer."""
    torch.manual_seed(settings.recipe.data.seed)
    return Dalle(DalleConfig.from_dict(settings.recipe.model))


def never() -> bool:
    """No Ctrl+C yet."""
    return False


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each source into its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
