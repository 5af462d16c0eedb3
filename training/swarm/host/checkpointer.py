"""What a donor does beside its steps: held-out losses and checkpoints, on a thread, so that it misses no step."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dalle_lean import Dalle
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import find_shards
from training.data.loader import Batch, collate
from training.data.validation import heldout_rows
from training.run.progress import OnNotice
from training.step.gradients import GradientComputer
from training.swarm.averaging.state_validation import tensors_sha256
from training.swarm.config import SwarmSettings
from training.swarm.host.checkpoints import Checkpoints
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer
from training.swarm.peer.gradient_worker import build_model
from training.swarm.preflight.checks import codes_of

CPU_SAMPLES = 64
"""Held-out samples at most where there is no GPU."""
SAMPLES_AT_ONCE = 4
"""Measured between two looks whether the end has come."""
RETRY_S = 30.0


class Checkpointer:
    """Looks after the state of a run.

    Args:
        checkpoints: where it goes.
        heldout: measured now and then; None where there is nothing.
        on_notice: told what a person should know.
        on_change: called when a number below has changed.
        stopped: whether it is to end soon: it finishes what it writes, and measures no more. Asked on any thread.
    """

    def __init__(
        self,
        settings: SwarmSettings,
        checkpoints: Checkpoints,
        heldout: Batch | None,
        *,
        device: str = "cpu",
        on_notice: OnNotice,
        on_change: Callable[[], None],
        stopped: Callable[[], bool] = lambda: False,
    ):
        self.settings, self.checkpoints, self.heldout = settings, checkpoints, heldout
        self.on_notice, self.on_change, self.stopped = on_notice, on_change, stopped
        self.copy = GradientComputer(build_model(settings).to(device), settings.recipe.memory, micro_batch_size=1)
        self.statistics: list[Tensor] = []
        self.work: threading.Thread | None = None
        self.heldout_loss = math.nan
        self.measured_step = 0
        self.saved_step = 0

    def restore(self, model: Dalle) -> tuple[int, list[Tensor]] | None:
        """See Checkpoints.restore."""
        found = self.checkpoints.restore(model)
        if found is not None:
            self.saved_step = self.measured_step = found[0]
        return found

    def look(self, step: int, optimizer: SwarmOptimizer, model: Dalle) -> None:
        """Do what is due at this step; returns once it has a copy of the state."""
        is_due = self.checkpoints.is_due(step)
        if not is_due and not self.is_measuring_due(step):
            return
        if self.is_busy:
            if is_due:
                self.on_notice(f"the checkpoint before step {step} is still being written; this one is left out")
                self.checkpoints.tried = step
            return
        self.take_copy(optimizer, model)
        self.work = threading.Thread(target=self.keep, args=(step, is_due), name="checkpointer", daemon=True)
        self.work.start()

    def is_measuring_due(self, step: int) -> bool:
        """Whether the held-out loss is to be measured at this step."""
        every = self.settings.recipe.schedule.heldout_every
        return self.heldout is not None and every > 0 and step // every > self.measured_step // every

    @property
    def is_busy(self) -> bool:
        return self.work is not None and self.work.is_alive()

    @torch.no_grad()
    def take_copy(self, optimizer: SwarmOptimizer, model: Dalle) -> None:
        """The state as it is now."""
        self.copy.model.load_state_dict(model.state_dict())
        averager = optimizer.state_averager
        self.statistics = [tensor.clone() for tensor in averager.state_tensors()[len(averager.main_parameters) :]]

    def keep(self, step: int, save: bool) -> None:
        """Measure the copy and write it; runs on the thread."""
        if self.heldout is not None:
            self.heldout_loss, self.measured_step = math.nan, step
            with self.told(f"the held-out loss of step {step} was not measured"):
                self.heldout_loss = self.measure(self.heldout)
                self.on_change()
        if save:
            with self.told(f"the state of step {step} was not kept"):
                self.save(step, self.heldout_loss)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Nobody would hear of an exception on the thread otherwise."""
        try:
            yield
        except Exception as error:
            self.on_notice(f"{what}: {type(error).__name__}: {error}")

    def measure(self, heldout: Batch) -> float:
        """The copy's loss; nan where the end came before it was known."""
        loss_sum = 0.0
        for part in zip(*(tensor.split(SAMPLES_AT_ONCE) for tensor in heldout), strict=True):
            if self.stopped():
                return math.nan
            batch = Batch(*part)
            loss_sum += self.copy.measure(batch)["heldout_loss"] * len(batch.text_ids)
        return loss_sum / len(heldout.text_ids)

    def save(self, step: int, heldout_loss: float) -> None:
        """Write the copy."""
        if self.checkpoints.save(step, self.copy.model, self.statistics, heldout_loss):
            self.saved_step = step
        self.on_change()

    def close(
        self, step: int, optimizer: SwarmOptimizer, model: Dalle, wait: Callable[[float], bool] = lambda _: True
    ) -> None:
        """Write where the run stopped, so that it goes on from there.

        The run's last state is tried again until it is written or `wait(seconds)` is true.
        """
        if self.work is not None:
            self.work.join()
        if step <= self.saved_step:
            return
        self.take_copy(optimizer, model)
        if step < self.settings.total_steps:  # somebody waits for the end, and it is not measured again
            self.save(step, math.nan)
            return
        self.keep(step, save=True)
        while not self.is_finished and not wait(RETRY_S):
            self.save(step, self.heldout_loss)

    @property
    def is_finished(self) -> bool:
        """Whether the run's last state is written."""
        return self.saved_step >= self.settings.total_steps


def heldout_batch(settings: SwarmSettings, tokenizer: Path, on_notice: OnNotice, device: str = "cpu") -> Batch | None:
    """What is measured: the same samples for all. None where the data cannot be read from here, which is said."""
    recipe = settings.recipe
    count = recipe.data.heldout_samples if device != "cpu" else min(recipe.data.heldout_samples, CPU_SAMPLES)
    try:
        shards = find_shards(settings.swarm.data, codes=codes_of(settings), on_notice=on_notice)
        rows = heldout_rows(shards, recipe.data.heldout_share, count)
    except (ValueError, OSError) as error:
        on_notice(f"no held-out loss: {error}")
        return None
    return collate(rows, Tokenizer.from_file(tokenizer), recipe.model["text_len"]) if len(rows) else None


def go_on_from(optimizer: SwarmOptimizer, epoch: int, statistics: list[Tensor]) -> None:
    """Have the optimizer go on from this step of the swarm, with the weights it has and these statistics.

    StateRefused where they are not this optimizer's.
    """
    averager = optimizer.state_averager
    own = averager.state_tensors()
    tensors = [*own[: len(averager.main_parameters)], *statistics]
    with optimizer.tracker.pause_updates():
        averager.adopt({"epoch": epoch, "sha256": tensors_sha256(tensors)}, tensors)
        optimizer.tracker.report_local_progress(local_epoch=epoch, samples_accumulated=0)
        averager.state_sharing_priority = epoch
