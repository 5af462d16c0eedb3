"""Measures the held-out loss and writes checkpoints on a thread, so that a donor misses no step."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dalle_lean import Dalle
from dalle_lean.progress import OnNotice
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import find_shards
from training.data.heldout import heldout_rows
from training.data.loader import Batch, collate
from training.step.gradients import GradientComputer
from training.swarm.averaging.state_validation import tensors_sha256
from training.swarm.config import SwarmSettings
from training.swarm.host.checkpoints import Checkpoint, Checkpoints, is_intact, list_checkpoints
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer
from training.swarm.peer.gradient_worker import build_model
from training.swarm.preflight.checks import codes_of

MAX_CPU_SAMPLES = 64
"""Most held-out samples without a GPU."""
SAMPLES_AT_ONCE = 4
"""Measured between two calls of `stopped`."""
RETRY_S = 30.0
MAX_RISE = 1.1
"""Largest held-out loss, relative to the least of the latest MEASURED ones; the samples are always the same."""
MEASURED = 10
MAX_ROLLBACKS = 5
"""After these, the host only warns: a run that keeps diverging has another problem than one bad peer."""


class LossGuard:
    """Watches a run's held-out loss."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=MEASURED)

    def limit(self, loss: float) -> float | None:
        """Check a loss in nats: returns the limit that it exceeds, or None and remembers the loss."""
        limit = MAX_RISE * min(self.losses, default=loss)
        if loss > limit:
            return limit
        if not math.isnan(loss):  # measured
            self.losses.append(loss)
        return None


class Checkpointer:
    """Saves and measures the state of a run.

    Args:
        heldout: samples for the held-out loss; None measures nothing.
        on_change: called when an attribute has changed.
        stopped: whether to stop soon, without measuring; called on any thread.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        heldout: Batch | None,
        *,
        device: str = "cpu",
        on_change: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ):
        self.checkpoints, self.heldout, self.on_change, self.stopped = checkpoints, heldout, on_change, stopped
        self.settings, self.on_notice = checkpoints.settings, checkpoints.on_notice
        model = build_model(self.settings).to(device)
        self.copy = GradientComputer(model, self.settings.recipe.memory, micro_batch_size=1)
        self.statistics: list[Tensor] = []
        self.worker: threading.Thread | None = None
        self.heldout_loss = math.nan
        self.measured_step = 0
        self.saved_step = 0
        self.away_s = 0.0
        """Time since the restored checkpoint of this run was saved."""
        self.loss_guard = LossGuard()
        self.go_back_to: int | None = None
        """The step of the checkpoint to roll back to, once the held-out loss has risen too far."""
        self.is_delayed = False  # whether a checkpoint is due that waits for the thread
        self.members: Sequence[str] = ()
        """The peers that took part in the steps before the measured state."""

    def restore(self, model: Dalle) -> tuple[int, list[Tensor]] | None:
        """As Checkpoints.restore; also measures the held-out loss, on the thread, if the checkpoint has none."""
        found = self.checkpoints.restore(model)
        if found is not None:
            self.saved_step = self.measured_step = found[0]
            saved = self.saved()
            for checkpoint in saved:
                self.loss_guard.limit(checkpoint.heldout_loss)
            restored = next(checkpoint for checkpoint in saved if checkpoint.step == found[0])
            if restored.run == self.settings.run_id:  # after a rollback nobody can have trained since
                self.away_s = max(0.0, time.time() - restored.saved_at)
            if math.isnan(restored.heldout_loss) and self.heldout is not None:
                self.copy.model.load_state_dict(model.state_dict())
                self.start_worker(self.measure_restored, found[0], self.heldout)
        return found

    def start_worker(self, task: Callable[..., None], *arguments: object) -> None:
        self.worker = threading.Thread(target=task, args=arguments, name="checkpointer", daemon=True)
        self.worker.start()

    def measure_restored(self, step: int, heldout: Batch) -> None:
        """Measure a restored checkpoint: without a held-out loss, the run could not be rolled back to it."""
        with self.reported(f"the held-out loss of step {step} was not measured"):
            self.heldout_loss = self.measure(heldout)
            self.loss_guard.limit(self.heldout_loss)
            self.checkpoints.record_loss(step, self.heldout_loss)
            self.on_change()

    def poll(self, step: int, optimizer: SwarmOptimizer, model: Dalle) -> None:
        """Start the measurement or checkpoint that is due at this step; returns once the state is copied."""
        is_due = self.checkpoints.is_due(step)
        every = self.settings.recipe.schedule.heldout_every
        is_measuring_due = self.heldout is not None and every > 0 and step // every > self.measured_step // every
        if not is_due and not is_measuring_due:
            return
        if self.worker is not None and self.worker.is_alive():
            if is_due and not self.is_delayed:
                self.on_notice(f"the checkpoint of step {step} waits for the measurement or checkpoint before it")
            self.is_delayed |= is_due
            return
        self.is_delayed = False
        self.take_copy(optimizer, model)
        self.members = optimizer.latest_members()
        if is_due:
            self.checkpoints.last_attempt = step
        self.start_worker(self.measure_and_save, step, is_due)

    @torch.no_grad()
    def take_copy(self, optimizer: SwarmOptimizer, model: Dalle) -> None:
        self.copy.model.load_state_dict(model.state_dict())
        averager = optimizer.state_averager
        self.statistics = [tensor.clone() for tensor in averager.state_tensors()[len(averager.main_parameters) :]]

    def measure_and_save(self, step: int, save: bool) -> None:
        """Measure and save the copy; runs on the thread."""
        if self.heldout is not None:
            self.heldout_loss, self.measured_step = math.nan, step
            with self.reported(f"the held-out loss of step {step} was not measured"):
                self.heldout_loss = self.measure(self.heldout)
                self.judge(step, self.heldout_loss)
                self.on_change()
        if save:
            with self.reported(f"the state of step {step} was not saved"):
                self.save(step, self.heldout_loss)

    @contextmanager
    def reported(self, what: str) -> Iterator[None]:
        """Turn exceptions on the thread into notices."""
        try:
            yield
        except Exception as error:
            self.on_notice(f"{what}: {type(error).__name__}: {error}")

    def measure(self, heldout: Batch) -> float:
        """The copy's held-out loss in nats; nan if stopped meanwhile."""
        loss_sum = 0.0
        for part in zip(*(tensor.split(SAMPLES_AT_ONCE) for tensor in heldout), strict=True):
            if self.stopped():
                return math.nan
            batch = Batch(*part)
            loss_sum += self.copy.measure(batch)["heldout_loss"] * len(batch.text_ids)
        return loss_sum / len(heldout.text_ids)

    def judge(self, step: int, loss: float) -> None:
        """If the loss has risen too far, request a rollback to the last good checkpoint."""
        limit = self.loss_guard.limit(loss)
        if limit is None or self.go_back_to is not None:
            return
        risen = f"the held-out loss of step {step} is {loss:.4g}, more than {limit:.4g}"
        measured_good = (saved for saved in reversed(self.saved()) if saved.heldout_loss <= limit)
        good = next((saved for saved in measured_good if is_intact(saved.folder)), None)
        if self.settings.swarm.rollbacks >= MAX_ROLLBACKS or good is None:
            why = f"{MAX_ROLLBACKS} rollbacks did not help" if good else "there is no good checkpoint to go back to"
            self.on_notice(f"{risen}; {why}, so the run needs your attention")
            return
        self.go_back_to = good.step
        self.on_notice(
            f"{risen}: rolling back to the checkpoint of step {good.step}. Members of the latest steps: "
            f"{', '.join(self.members) or 'nobody'}"
        )

    def saved(self) -> list[Checkpoint]:
        return list_checkpoints(self.checkpoints.run_dir, self.on_notice)

    def save(self, step: int, heldout_loss: float) -> None:
        if self.checkpoints.save(step, self.copy.model, self.statistics, heldout_loss):
            self.saved_step = step
        self.on_change()

    def close(self, step: int, optimizer: SwarmOptimizer, model: Dalle, wait: Callable[[float], bool]) -> None:
        """Save the state upon leaving; the final state is retried until it is saved or `wait(seconds)` is true."""
        if self.worker is not None:
            self.worker.join()
        if step <= self.saved_step:
            return
        self.take_copy(optimizer, model)
        if step < self.settings.total_steps:  # the user need not wait for a measurement
            self.save(step, math.nan)
            return
        self.measure_and_save(step, save=True)
        while not self.is_finished and not wait(RETRY_S):
            self.save(step, self.heldout_loss)

    @property
    def is_finished(self) -> bool:
        """Whether the run's final state is saved."""
        return self.saved_step >= self.settings.total_steps


def heldout_batch(settings: SwarmSettings, tokenizer: Path, on_notice: OnNotice, device: str = "cpu") -> Batch | None:
    """The held-out samples, the same on all machines; None, with a notice, if this machine cannot read the data."""
    recipe = settings.recipe
    count = recipe.data.heldout_samples if device != "cpu" else min(recipe.data.heldout_samples, MAX_CPU_SAMPLES)
    try:
        shards = find_shards(settings.swarm.data, codes=codes_of(settings), on_notice=on_notice)
        rows = heldout_rows(shards, recipe.data.heldout_share, count)
    except (ValueError, OSError) as error:
        on_notice(f"no held-out loss: {error}")
        return None
    return collate(rows, Tokenizer.from_file(tokenizer), recipe.model["text_len"]) if len(rows) else None


def resume_from(optimizer: SwarmOptimizer, epoch: int, statistics: list[Tensor]) -> None:
    """Continue from this epoch with the current weights and these statistics, or with new statistics if empty.

    StateRefused if the statistics do not fit the optimizer.
    """
    averager = optimizer.state_averager
    own, num_weights = averager.state_tensors(), len(averager.main_parameters)
    tensors = [*own[:num_weights], *(statistics or own[num_weights:])]
    with optimizer.tracker.pause_updates():
        averager.adopt({"epoch": epoch, "sha256": tensors_sha256(tensors)}, tensors)
        optimizer.tracker.report_local_progress(local_epoch=epoch, samples_accumulated=0)
        averager.state_sharing_priority = epoch
