"""The training loop: step, log, evaluate, save, and stop so that the same command continues."""

import dataclasses
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.progress import OnProgress
from training.run.allocator import keep_freed_memory
from training.run.checkpoint import save_checkpoint
from training.run.graceful_stop import TimeLimit, interrupt_deferred
from training.run.loop_settings import LoopSettings
from training.run.metrics import MetricsLog, Throughput
from training.run.processes import ALONE, Processes
from training.run.progress import StepCount, TrainingDiverged

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")
P = TypeVar("P", bound=StepCount)


class TrainingRun(ABC, Generic[Batch, P]):
    """A run in the folder `out`. A subclass sets the attributes, restores its checkpoint, and implements the steps.

    Attributes:
        result: the file or folder that `write_result` writes last.
        identity: settings and data of the run; see `run` of `save_checkpoint`.
        unit: what a batch holds.
        processes: those that share the steps; all run this loop, and the first one writes the files.
    """

    out: Path
    result: Path
    settings: LoopSettings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scales: BranchScales | None = None
    identity: dict[str, Any]
    progress: P
    unit: str = "pictures"
    metrics: MetricsLog
    processes: Processes = ALONE

    @abstractmethod
    def batches(self, stopping: Callable[[], bool]) -> Generator[Batch, None, None]:
        """The batches of the remaining steps; they may end early once `stopping` returns true."""

    @abstractmethod
    def step(self, step: int, batch: Batch) -> Mapping[str, float] | None:
        """Learn from a batch; `step` counts from 1.

        Returns the "loss" and other numbers to log; if one is not finite, nothing was changed. Returns None if only the
        scales of float16 gradients were changed.
        """

    @abstractmethod
    def evaluate(self) -> None:
        """Measure held-out data if that is due, and write the results to `metrics`."""

    @abstractmethod
    def write_result(self) -> None:
        """Write `result` from the current weights."""

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.settings.steps

    def due(self, interval: int) -> bool:
        """Whether something done every `interval` steps (0: never) and after the last step is due."""
        return interval > 0 and (self.finished or self.progress.step % interval == 0)

    def run(self, on_progress: OnProgress | None = None, limit: TimeLimit | None = None) -> P:
        """Take the remaining steps, or those before the `limit`, and return the progress.

        Notices to the user, such as the answer to Ctrl+C, are logged.

        Args:
            on_progress: called with (done, total, note) in `unit`s, at the start and after each step.

        Raises:
            TrainingDiverged: `max_skipped_in_row` steps changed nothing; the last checkpoint is kept.
            KeyboardInterrupt, Terminated: on Ctrl+C or SIGTERM, once the step is finished and saved.
        """
        if self.finished:
            logger.info(f"already finished at step {self.progress.step}")
            if self.result.exists():
                return self.progress
        elif self.progress.step and self.processes.first:
            logger.info(f"continuing from step {self.progress.step}/{self.settings.steps}")
        if self.processes.first:
            warn_of_too_many_threads()
        keep_freed_memory()
        limit = limit or TimeLimit(None)
        self.saved_step = self.progress.step
        self.throughput = Throughput()
        size, steps = self.settings.batch_size, self.settings.steps

        def report() -> None:
            if on_progress is not None:
                on_progress(self.progress.step * size, steps * size, self.progress.note(steps))

        with (
            interrupt_deferred(logger.info) as interrupted,
            closing(self.batches(lambda: interrupted() or limit.reached())) as batches,
            closing(MetricsLog(self.out if self.processes.first else None, self.progress.step)) as self.metrics,
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
            # After the last step the checkpoint comes last: once it exists, so does the result.
            if not self.finished and self.unsaved:
                self.save_checkpoint()
            self.write_result()
            if self.finished and self.unsaved:
                self.save_checkpoint()
            if interrupted() and not self.finished and self.processes.first:
                saved = f"step {self.saved_step}/{self.settings.steps}" if self.saved_step else "nothing yet"
                logger.info(f"saved in {self.out}: {saved}; the same command continues")
            interrupted.end()
        return self.progress

    def take_step(self, batch: Batch) -> None:
        """Learn from a batch; too many non-finite steps in a row end the run."""
        progress, step = self.progress, self.progress.step + 1
        numbers = self.step(step, batch)
        self.throughput.count(**{self.unit: self.settings.batch_size})
        if numbers is None:
            progress.step = step
        elif not progress.count_step(numbers):
            self.metrics.write(step, skipped=progress.skipped)
            if progress.skipped_in_row >= self.settings.max_skipped_in_row:
                listed = ", ".join(f"{name} {number}" for name, number in numbers.items())
                raise TrainingDiverged(
                    f"{progress.skipped_in_row} steps in a row had a non-finite loss or gradient, until step {step} "
                    f"({listed}); {self.out} keeps the state of step {self.saved_step}; try a lower learning rate, a "
                    "longer warm-up or fp32"
                )
        elif self.due(self.settings.log_every):
            self.log(numbers, self.throughput.per_second())

    def log(self, numbers: Mapping[str, float], rates: Mapping[str, float]) -> None:
        """Write the numbers of a step, and the rates since the last logged step."""
        self.metrics.write(self.progress.step, **numbers, **rates)

    def save(self) -> None:
        """Called every `checkpoint_every` steps."""
        self.save_checkpoint()

    @property
    def unsaved(self) -> bool:
        """Whether a step since the last checkpoint is worth saving; after skipped steps, the weights are suspect."""
        return self.progress.skipped_in_row == 0 and self.saved_step < self.progress.step

    def save_checkpoint(self) -> None:
        """Write everything a killed run needs to resume."""
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


def warn_of_too_many_threads() -> None:
    """Log a warning if torch has more intra-op threads than this process has cores: they wait for each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (threads := torch.get_num_threads()) > cores:
        logger.warning(
            f"torch has {threads} threads for {cores} CPU core{'s' * (cores > 1)}, so that every operation waits for a "
            f"time slice; set OMP_NUM_THREADS={cores}"
        )
