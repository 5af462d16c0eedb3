"""A trainer's loop: gradients on its own data, steps with all the others."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import hivemind
from hivemind.utils import get_dht_time

from dalle_lean.ending import Terminated
from dalle_lean.io.files import read_json, write_json
from dalle_lean.progress import OnNotice, silent
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet
from training.data.heldout import heldout_rows
from training.data.loader import Batch, TrainingData, collate
from training.data.sampler import Position
from training.run.graceful_stop import interrupt_deferred, raise_interrupt
from training.swarm.averaging.state_validation import validate_state
from training.swarm.config import SwarmSettings
from training.swarm.network.owner_keys import owner_key, records_by_owner
from training.swarm.network.run_watch import RunWatch
from training.swarm.observe.overview import StepPace
from training.swarm.observe.peer_metrics import PeerMetrics
from training.swarm.optimizer.build import swarm_optimizer
from training.swarm.optimizer.progress_tracker import MIN_TRAINER_SAMPLES_PER_S
from training.swarm.optimizer.swarm_optimizer import OutOfSync, ProcessEnded
from training.swarm.peer.gradient_worker import GradientWorker, Order
from training.swarm.peer.status_line import PeerStatus

VALIDATION_SAMPLES, VALIDATION_SHARDS = 64, 4
"""Read to validate downloaded states while a newcomer waits; fewer shards would be less representative."""
POLL_S = 0.5
PRESENCE_S = 10.0
"""How long a trainer that waits for others counts as present."""


class Peer(GradientWorker):
    """A trainer of a run.

    Args:
        folder: stores its position in the data, from which it continues.
        options: see GradientWorker; a batch is what this peer computes between two reports to the others. With several
            processes, this is rank 0, and the others run `run_rank`.
        on_step: called with the metrics after each batch.
        addresses: of helpers, as this machine reaches them; they tell where the run continues.
    """

    def __init__(
        self,
        settings: SwarmSettings,
        dht: hivemind.DHT,
        shards: ShardSet,
        tokenizer: Tokenizer,
        *,
        folder: Path,
        on_step: Callable[[PeerMetrics], None] = lambda _: None,
        on_download: Callable[[int, int, str], None] = lambda *_: None,
        on_notice: OnNotice = silent,
        addresses: Sequence[str] = (),
        **options: Any,
    ):
        super().__init__(settings, **options)
        self.dht, self.on_step, self.on_download, self.on_notice = dht, on_step, on_download, on_notice
        data = settings.recipe.data
        self.tokenizer, self.folder, self.position_file = tokenizer, folder, folder / "cursor.json"
        self.data = TrainingData(shards, data, dht.peer_id.to_base58())  # each peer has its own order
        count = min(VALIDATION_SAMPLES, data.heldout_samples)
        rows = heldout_rows(shards, data.heldout_share, count, VALIDATION_SHARDS)
        self.metrics, self.pace = PeerMetrics(), StepPace()
        self.times_broadcast = 0
        """`times_applied` when the other processes last received the weights."""
        self.optimizer = swarm_optimizer(settings, self.model, dht, on_notice=self.on_notice)
        averager = self.optimizer.state_averager
        averager.on_download = self.report_download
        if len(rows):
            heldout = collate(rows, tokenizer, self.model.config.text_len)
            averager.validate = partial(validate_state, self.gradients, heldout, averager.main_parameters)
        # Last: its threads must not be forked.
        self.watch = RunWatch(dht, settings, addresses, self.optimizer.stop_matchmaking)

    @property
    def is_over(self) -> bool:
        """Whether a donor has the last step."""
        known = self.optimizer.tracker.donor_epoch
        return self.watch.over or (known is not None and known >= self.settings.last_epoch)

    @property
    def finished(self) -> bool:
        """Whether the schedule has ended, for this peer or for a donor, or the run has moved."""
        return self.watch.moved is not None or self.is_over or self.optimizer.local_epoch >= self.settings.last_epoch

    def run(
        self, end_at_once: Callable[[], NoReturn] = raise_interrupt, on_terminate: Callable[[], None] = lambda: None
    ) -> None:
        """Train until the schedule ends, Ctrl+C or SIGTERM, then leave cleanly.

        Args:
            end_at_once: called upon a second Ctrl+C, or one while this peer leaves.
            on_terminate: called upon SIGTERM, before leaving.

        Raises OutOfSync if the others' state cannot be downloaded.
        """
        try:
            with interrupt_deferred(self.on_notice, end_at_once, on_terminate) as self.interrupted:
                self.wait_for_peers()
                self.wait_for_host()
                if not self.is_over:
                    self.catch_up_and_train()
                if self.is_over and not self.metrics.samples:
                    self.on_notice(f"the run is over: its last step, {self.settings.total_steps}, is done")
                self.interrupted.end()
                self.wait_for_donors()
        finally:
            signal.signal(signal.SIGINT, lambda *_: end_at_once())
            self.watch.close()
            self.optimizer.shutdown()

    def catch_up_and_train(self) -> None:
        """Raises OutOfSync, unless the run is over, whose peers no longer serve a state."""
        try:
            if self.optimizer.tracker.global_epoch > self.optimizer.local_epoch:
                self.optimizer.load_state_from_peers()
            # Not `local_epoch`, which also counts steps whose weights nobody served.
            if self.optimizer.state_averager.state_epoch < self.settings.first_epoch and not self.finished:
                raise OutOfSync("no peer serves the weights that the run began with; try again later")
            self.train()
        except OutOfSync:
            if not self.is_over:
                raise

    def report_download(self, received: int, total: int, donor: str) -> None:
        """Report a download's progress; raises KeyboardInterrupt, Terminated or OutOfSync if this peer should end."""
        self.interrupted.end()
        if self.is_over:
            raise OutOfSync("the run is over")
        self.on_download(received, total, donor)

    def wait_for_peers(self) -> None:
        """The barrier before the first step: hivemind would run ahead alone, then wait for the others in vain."""
        min_peers, before = self.settings.swarm.min_peers, -1
        key = f"{self.settings.run_id}_waiting"
        while min_peers > 1 and not self.finished and not self.has_begun:
            expiration = get_dht_time() + PRESENCE_S
            self.dht.store(key, subkey=owner_key(self.dht), value=True, expiration_time=expiration)
            present = len(records_by_owner(self.dht.get(key, latest=True)))
            if present >= min_peers:
                return
            if present != before:
                self.on_notice(f"{present} of {min_peers} trainers are here; waiting for {min_peers - present} more")
                before = present
            self.pause()

    def wait_for_host(self) -> None:
        """Wait for a donor of the host, or for trainers beyond the first step.

        Alone, this peer would begin anew a run that may be far ahead, or over; and if the run begins with given
        weights, only they have them.
        """
        tracker, first = self.optimizer.tracker, self.settings.first_epoch
        needs_host = first > 0 or bool(self.settings.swarm.donors)

        def is_alone() -> bool:
            known = tracker.global_epoch - 1 if tracker.donor_epoch is None else tracker.donor_epoch
            return needs_host and not self.finished and known < first

        if is_alone():
            self.on_notice("waiting for the host, which has the weights and knows how far the run is")
        while is_alone():
            self.pause()

    def wait_for_donors(self) -> None:
        """After the last step, stay until a donor has its state: one that missed the step fetches it.

        It first looks for a group, twice if it had just begun. Whatever happens here, this peer's run is complete, so
        signals and ended processes only end the wait.
        """
        tracker, timing = self.optimizer.tracker, self.settings.timing
        longest_s = 2 * timing.averaging_timeout_s + timing.load_state_timeout_s
        deadline = time.monotonic() + longest_s

        def are_behind() -> bool:
            known = tracker.donor_epoch
            waits = self.watch.moved is None and not self.watch.over
            return waits and known is not None and known < self.optimizer.local_epoch

        if are_behind() and not self.dht.client_mode:  # a client serves no state
            self.on_notice(f"the last step is done; staying until the host has it, {longest_s:.0f} s at most")
            with suppress(KeyboardInterrupt, Terminated, ProcessEnded):
                while are_behind() and time.monotonic() < deadline:
                    self.pause()

    def pause(self) -> None:
        """Wait before polling again; raises KeyboardInterrupt, Terminated or ProcessEnded if this peer should end."""
        self.interrupted.end()
        self.optimizer.check_processes()
        time.sleep(POLL_S)

    @property
    def has_begun(self) -> bool:
        """Whether others already train."""
        progress = self.optimizer.tracker.global_progress
        return bool(progress.epoch > self.settings.first_epoch or progress.samples_accumulated > 0)

    def train(self) -> None:
        """Add the batches' gradients to the swarm's steps, except those that are not finite."""
        with self.batches() as ahead:
            losses: list[float] = []
            for batch, position in ahead:
                if self.interrupted() or self.finished:
                    return
                epoch, started = self.optimizer.local_epoch, time.perf_counter()
                samples, rescaled = len(batch.text_ids), self.rescaled
                loss = self.compute(batch, epoch)
                if math.isfinite(loss):
                    losses.append(loss)
                    self.metrics.samples += samples
                    self.optimizer.step(batch_size=samples)
                else:
                    self.metrics.dropped_batches += self.rescaled == rescaled
                    self.optimizer.step(batch_size=0)
                if not self.has_inner_steps:
                    self.optimizer.zero_grad()
                self.metrics.samples_per_s = samples / (time.perf_counter() - started)
                if self.optimizer.local_epoch != epoch:
                    self.metrics.loss = sum(losses) / len(losses) if losses else math.nan
                    losses.clear()
                    self.write_position(position)
                self.report_metrics()

    def batches(self) -> AbstractContextManager[Iterator[tuple[Batch, Position]]]:
        """Endless prefetched batches for all processes, from the saved position, each with the position after it."""
        size = self.batch_size * self.processes.world
        batches = self.data.batches(size, self.tokenizer, self.model.config.text_len, self.read_position())
        pin = self.gradients.device.type == "cuda"
        return closing(self.data.ahead(batches, pin=pin, stop_waiting=self.interrupted))

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

    def compute(self, batch: Batch, epoch: int) -> float:
        """`learn_from` on all processes, for the swarm's next step."""
        step = epoch + 1
        if self.has_inner_steps:
            step = self.optimizer.inner_step(self.settings.recipe.data.batch_size)
        before, self.times_broadcast = self.times_broadcast, self.optimizer.state_averager.times_applied
        order = Order(step, new_weights=self.times_broadcast != before)
        return self.follow(self.processes.from_first(order), batch)

    def report_metrics(self) -> None:
        optimizer, metrics = self.optimizer, self.metrics
        metrics.epoch = optimizer.local_epoch
        self.pace.observe(metrics.epoch, time.monotonic())
        metrics.dropped_tensors = optimizer.state_averager.dropped_tensors + optimizer.grad_averager.dropped_tensors
        metrics.skipped_steps, metrics.resyncs = optimizer.opt.skipped_steps, optimizer.resyncs
        metrics.solo_steps = optimizer.solo_steps
        self.on_step(metrics)

    def status(self) -> PeerStatus:
        """The current status; may be called on any thread."""
        tracker, settings, own = self.optimizer.tracker, self.settings, self.metrics
        step, pace = settings.last_epoch if self.is_over else self.optimizer.local_epoch, self.pace.steps_per_s
        rate = tracker.local_progress.samples_per_second
        if rate < MIN_TRAINER_SAMPLES_PER_S:  # until the second report
            rate = own.samples_per_s
        return PeerStatus(
            step=step * settings.steps_per_epoch,
            total_steps=settings.total_steps,
            left_s=(settings.last_epoch - step) / pace if pace else math.nan,
            next_step_s=max(0.0, tracker.global_progress.eta_next_epoch - get_dht_time()),
            trainers=max(tracker.trainers, 1 if own.samples else 0),
            samples_per_s=rate if own.samples else 0.0,
            own=own,
        )
