"""The training loop: step, log, evaluate, save, and stop where the same command continues."""

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.optim.lamb_delayed import DelayedLamb
from dalle_lean.progress import OnProgress
from training.run.checkpoint import save_checkpoint
from training.run.graceful_stop import TimeLimit, interrupt_deferred
from training.run.loop_settings import LoopSettings
from training.run.metrics import MetricsLog, Throughput
from training.run.processes import ALONE, Processes
from training.run.progress import StepCount

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")
P = TypeVar("P", bound=StepCount)


class TrainingRun(ABC, Generic[Batch, P]):
    """A run in the folder `out`. A subclass sets the attributes, restores its checkpoint, and knows how to learn.

    Attributes:
        result: the file or folder that `write_result` writes last.
        identity: what the run is, as `save_checkpoint` takes it.
        unit: of what a batch holds, such as "pictures".
        processes: that take the steps together: all run this loop, and the first one writes the files.
    """

    out: Path
    result: Path
    settings: LoopSettings
    model: nn.Module
    optimizer: torch.optim.Optimizer | DelayedLamb
    scales: BranchScales | None = None
    identity: dict[str, Any]
    progress: P
    unit: str
    metrics: MetricsLog
    processes: Processes = ALONE

    @abstractmethod
    def batches(self, stopping: Callable[[], bool]) -> Generator[Batch, None, None]:
        """The batches of the steps that are left; they may end early where `stopping` says so."""

    @abstractmethod
    def step(self, step: int, batch: Batch) -> Mapping[str, float] | None:
        """Learn from a batch; `step` counts from 1.

        Returns the "loss" and whatever else is logged of the step; where a number is not finite, nothing was changed.
        None where only the scales of float16 gradients were.
        """

    @abstractmethod
    def evaluate(self) -> None:
        """Measure held-out data, where that is due, and write what is found to `metrics`."""

    @abstractmethod
    def write_result(self) -> None:
        """Write what the run is for, from the weights as they are."""

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.progress.step >= self.settings.steps

    def due(self, interval: int) -> bool:
        """Whether something done every `interval` steps (0: never) is due."""
        return interval > 0 and (self.finished or self.progress.step % interval == 0)

    def go(self, on_progress: OnProgress | None = None, limit: TimeLimit | None = None) -> P:
        """Take the steps that are left, or those before the `limit`; returns how far the run is. What a person should
        read at once, such as the answer to Ctrl+C, is logged.

        Args:
            on_progress: called with (done, total, note) in `unit`s, at the start and after each step.

        Raises:
            TrainingDiverged: `max_skipped_in_row` steps changed nothing; the last checkpoint stays as it was.
            KeyboardInterrupt, Terminated: upon Ctrl+C or SIGTERM, once the step is finished and saved.
        """
        if self.finished:
            logger.info(f"already finished at step {self.progress.step}")
            if self.result.exists():
                return self.progress
        limit = limit or TimeLimit(None)
        self.saved_step = self.progress.step
        self.pace = Throughput()
        size, steps = self.settings.batch_size, self.settings.steps

        def report() -> None:
            if on_progress is not None:
                on_progress(self.progress.step * size, steps * size, self.progress.note(steps))

        with (
            interrupt_deferred(logger.info) as interrupted,
            closing(self.batches(lambda: interrupted() or limit.reached())) as batches,
            MetricsLog(self.out if self.processes.first else None, self.progress.step) as self.metrics,
        ):
            report()
            for batch in batches:
                self.take_step(batch)
                self.evaluate()
                if self.unsaved and not self.finished and self.due(self.settings.checkpoint_every):
                    self.save()
                report()
                if self.processes.any(interrupted() or limit.reached()):
                    break
            # Where the run is finished the checkpoint comes last: with it, the result is never written again.
            if not self.finished and self.unsaved:
                self.save_checkpoint()
            self.write_result()
            if self.finished and self.unsaved:
                self.save_checkpoint()
            interrupted.end()
        return self.progress

    def take_step(self, batch: Batch) -> None:
        """Learn from a batch; a step that is not finite is counted and, many in a row, the end."""
        progress, step = self.progress, self.progress.step + 1
        numbers = self.step(step, batch)
        self.pace.count(**{self.unit: self.settings.batch_size})
        if numbers is None:
            progress.step = step
        elif not progress.count_step(numbers):
            self.metrics.write(step, skipped=progress.skipped)
            progress.refuse_divergence(
                numbers, self.settings.max_skipped_in_row, out=self.out, saved_step=self.saved_step
            )
        elif self.due(self.settings.log_every):
            self.log(numbers, self.pace.per_second())

    def log(self, numbers: Mapping[str, float], rates: Mapping[str, float]) -> None:
        """Write the numbers of a step, and how fast the steps since the last such line were."""
        self.metrics.write(self.progress.step, **numbers, **rates)

    def save(self) -> None:
        """What is written every `checkpoint_every` steps."""
        self.save_checkpoint()

    @property
    def unsaved(self) -> bool:
        """Whether there is something new that is worth keeping: many skipped steps may be the fault of the weights."""
        return self.progress.skipped_in_row == 0 and self.saved_step < self.progress.step

    def save_checkpoint(self) -> None:
        """Write all that a killed run needs."""
        save_checkpoint(
            self.out,
            model=self.model,
            optimizer=self.optimizer,
            scales=self.scales,
            processes=self.processes,
            progress=dataclasses.asdict(self.progress),
            run=self.identity,
        )
        self.saved_step = self.progress.step
