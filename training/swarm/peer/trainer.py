"""One peer's training loop: gradients on its own data, steps with all the others."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hivemind
from hivemind.utils import get_dht_time
from torch import Tensor

from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet
from training.data.loader import Batch, collate
from training.data.remote_io import silent
from training.data.sampler import Position
from training.data.validation import heldout_rows
from training.run.graceful_stop import Interruption, interrupt_deferred, raise_interrupt
from training.run.progress import OnNotice
from training.run.recipe import MemoryRecipe
from training.swarm.averaging.state_validation import validate_state
from training.swarm.config import SwarmSettings
from training.swarm.optimizer.build import swarm_optimizer
from training.swarm.peer.data_parallel import RankCommand, Ranks
from training.swarm.peer.gradient_worker import GradientWorker

JUDGE_SAMPLES, JUDGE_SHARDS = 64, 4
"""Whoever joins waits for these; of fewer shards they would say less."""
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
    solo_steps: int = 0
    """Steps for which no average could be had although others are there: taken with one's own gradients."""
    rescaled: int = 0
    """Batches left out because float16 overflowed in them; its scales are smaller now."""
    resyncs: int = 0
    """Downloads of the state."""


class Peer(GradientWorker):
    """A trainer of a run.

    Args:
        settings: of the run; its recipe's [model] is complete.
        dht: this machine's node.
        shards, tokenizer, folder, memory, device: see Portion.
        batch_size: samples of this process between two reports to the others.
        ranks: where several processes share the work this is rank 0; the others `follow` it.
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
        ranks: Ranks | None = None,
    ):
        identity = dht.peer_id.to_base58()
        super().__init__(
            settings,
            shards,
            tokenizer,
            identity=identity if ranks is None else ranks.share_text(identity),
            folder=folder,
            batch_size=batch_size,
            memory=memory,
            device=device,
            ranks=ranks,
        )
        self.dht, self.on_step, self.on_notice = dht, on_step, on_notice
        recipe = settings.recipe
        count = min(JUDGE_SAMPLES, recipe.data.heldout_samples)
        rows = heldout_rows(shards, recipe.data.heldout_share, count, JUDGE_SHARDS)
        self.heldout = collate(rows, tokenizer, self.model.config.text_len) if len(rows) else None
        self.done = Contribution()
        self.on_download, self.interrupted = on_download, Interruption()
        self.end_at_once: Callable[[], NoReturn] = raise_interrupt
        """Upon a second Ctrl+C."""
        self.on_terminate: Callable[[], None] = lambda: None
        """Upon SIGTERM, before it leaves."""
        self.handed_on = 0
        """How often the model had got weights from the swarm when the other ranks got them."""
        self.optimizer = swarm_optimizer(
            settings,
            self.model,
            dht,
            validate=self.validate_state,
            on_download=self.show_download,
            on_notice=self.on_notice,
        )

    @property
    def finished(self) -> bool:
        """Whether the schedule is at its end."""
        return self.optimizer.local_epoch * self.settings.steps_per_epoch >= self.settings.total_steps

    def validate_state(self, parameters: Sequence[Tensor]) -> None:
        """StateRefused where held-out samples say that these parameters are much worse than the present ones."""
        if self.heldout is not None:
            validate_state(self.gradients, self.heldout, self.optimizer_parameters(), parameters)

    def optimizer_parameters(self) -> Sequence[Tensor]:
        """The model's parameters in the order of the averagers."""
        parameters: Sequence[Tensor] = self.optimizer.state_averager.main_parameters
        return parameters

    def go(self) -> None:
        """Train until the schedule ends, Ctrl+C or SIGTERM; then leave cleanly.

        Raises OutOfSync where the state of the others cannot be had.
        """
        try:
            with interrupt_deferred(self.on_notice, self.end_at_once, self.on_terminate) as interrupted:
                self.interrupted = interrupted
                self.wait_for_peers(interrupted)
                self.catch_up()
                self.learn(interrupted)
                interrupted.end()
        finally:
            self.leave()

    def show_download(self, received: int, total: int, donor: str) -> None:
        """Tell how far a download of the state is; KeyboardInterrupt or Terminated once this process is to end."""
        self.interrupted.end()
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
        with self.batches(stop_waiting=interrupted) as ahead:
            losses: list[float] = []
            for batch, position in ahead:
                if interrupted() or self.finished:
                    return
                self.take(batch, position, losses)

    def take(self, batch: Batch, position: Position, losses: list[float]) -> None:
        """Add a batch's gradient to the swarm's next step, unless it is not finite."""
        epoch, started = self.optimizer.local_epoch, time.perf_counter()
        samples = len(batch.text_ids) * (1 if self.ranks is None else self.ranks.world)
        rescaled = self.rescaled
        loss = self.compute(batch, epoch)
        if math.isfinite(loss):
            losses.append(loss)
            self.done.samples += samples
            self.optimizer.step(batch_size=samples)
        else:
            self.done.dropped_batches += self.rescaled == rescaled
            self.optimizer.step(batch_size=0)
        if not self.takes_own_steps:
            self.optimizer.zero_grad()
        self.done.samples_per_s = samples / (time.perf_counter() - started)
        if self.optimizer.local_epoch != epoch:
            self.done.loss = sum(losses) / len(losses) if losses else math.nan
            losses.clear()
            self.write_cursor(position)
            if self.ranks is not None:
                self.ranks.tell(RankCommand.REMEMBER)
        self.tell()

    def compute(self, batch: Batch, epoch: int) -> float:
        """As `learn_from`, at the swarm's next step; on all ranks."""
        own = self.takes_own_steps
        step = self.optimizer.inner_step(self.settings.recipe.data.batch_size) if own else epoch + 1
        if self.ranks is not None:
            self.hand_on_weights(self.ranks)
            self.ranks.tell(RankCommand.LEARN, step)
        return self.learn_from(batch, step)

    def hand_on_weights(self, ranks: Ranks) -> None:
        """Let the other ranks have the weights, where they have changed since they were given out."""
        times_applied = self.optimizer.state_averager.times_applied
        if times_applied != self.handed_on:
            ranks.tell(RankCommand.TAKE_WEIGHTS)
            ranks.share(self.model)
            self.handed_on = times_applied

    def tell(self) -> None:
        """Bring the numbers up to date and show them."""
        self.done.epoch = self.optimizer.local_epoch
        self.done.dropped_tensors = (
            self.optimizer.state_averager.dropped_tensors + self.optimizer.grad_averager.dropped_tensors
        )
        self.done.skipped_steps = self.optimizer.opt.skipped_steps
        self.done.rescaled = self.rescaled
        self.done.solo_steps, self.done.resyncs = self.optimizer.solo_steps, self.optimizer.resyncs
        if self.on_step is not None:
            self.on_step(self, self.done)

    def leave(self) -> None:
        """Say goodbye; the swarm goes on."""
        if self.ranks is not None:
            self.hand_on_weights(self.ranks)
            self.ranks.tell(RankCommand.STOP)
        self.optimizer.shutdown()
