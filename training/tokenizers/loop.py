"""The steps of a run on pictures in memory: taken, counted, measured, saved, and stopped where the next run goes on."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dalle_lean.errors import UserError
from dalle_lean.progress import OnProgress
from training.run.checkpoint import save_checkpoint
from training.run.graceful_stop import TimeLimit, interrupt_deferred
from training.run.metrics import MetricsLog, Throughput
from training.run.progress import OnNotice, StepCount
from training.step.buffer_snapshot import remember

Rows = TypeVar("Rows")


class Schedule(Protocol):
    """What a recipe says of its steps; an interval is due at its multiples and at the end."""

    @property
    def steps(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def log_every(self) -> int: ...
    @property
    def heldout_every(self) -> int: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def max_skipped_in_row(self) -> int: ...


def take_steps(
    out: Path,
    schedule: Schedule,
    batches: Iterable[tuple[int, Rows]],
    take_step: Callable[[int, Rows], Mapping[str, float]],
    *,
    measure: Callable[[MetricsLog], None],
    finish: Callable[[MetricsLog], None],
    progress: StepCount,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: dict[str, Any],
    limit: TimeLimit,
    on_progress: OnProgress | None = None,
    on_notice: OnNotice | None = None,
) -> None:
    """Take the steps that are left, until they, or the time, or a person's patience end.

    Args:
        schedule: of the recipe.
        batches: (step, rows) of each; the first step of a run is 1.
        take_step: returns its "loss" and whatever else is told of it; where a number is not finite it changed nothing.
        measure: looks at held-out pictures and writes what it finds.
        finish: writes the result; Ctrl+C and SIGTERM wait for it.
        progress: is counted up; saved with the state of `model` and `optimizer`.
        run: what the run is, as `save_checkpoint` takes it.
        limit: after which the steps end where they are, with a result.
        on_progress: called with (done, total, note) in pictures.
        on_notice: called upon Ctrl+C and SIGTERM.

    Raises:
        TrainingDiverged: `max_skipped_in_row` steps changed nothing; the last checkpoint stays as it was.
        KeyboardInterrupt, Terminated: on Ctrl+C or SIGTERM, once the step is finished and, unless skipped, saved.
    """

    def due(interval: int) -> bool:
        return progress.step % interval == 0 or progress.step == schedule.steps

    saved_step = progress.step
    pace = Throughput()
    with MetricsLog(out, progress.step) as metrics, interrupt_deferred(on_notice) as interrupted:
        for step, rows in batches:
            numbers = take_step(step, rows)
            pace.count(pictures=schedule.batch_size)
            if not progress.count_step(numbers):
                metrics.write(step, skipped=progress.skipped)
                progress.refuse_divergence(numbers, schedule.max_skipped_in_row, out=out, saved_step=saved_step)
            elif due(schedule.log_every):
                metrics.write(step, **numbers, **pace.per_second())
            if due(schedule.heldout_every):
                measure(metrics)
            stopping = interrupted() or limit.reached()
            # Many bad steps may be the fault of the weights: what was saved before them stays.
            if progress.skipped_in_row == 0 and (due(schedule.checkpoint_every) or stopping):
                state = dataclasses.asdict(progress)
                save_checkpoint(out, model=model, optimizer=optimizer, progress=state, run=run)
                saved_step = step
            if on_progress is not None:
                total = schedule.steps * schedule.batch_size
                on_progress(step * schedule.batch_size, total, progress.note(schedule.steps))
            if stopping:
                interrupted.end()
                break
        finish(metrics)


def guarded_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[], Tensor],
    *,
    lr: float,
    clip_grad_norm: float,
) -> dict[str, float]:
    """Learn from `loss_of`, which calls the model -> loss, norm of the gradient before clipping ("grad_norm") and
    learning rate ("lr"). Where one is not finite, nothing is changed."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    model.train()
    put_back = remember(model)
    loss = loss_of()
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    numbers = {"loss": loss.item(), "grad_norm": norm.item(), "lr": lr}
    if all(math.isfinite(number) for number in numbers.values()):
        optimizer.step()
    else:
        put_back()
    model.eval()
    return numbers


def what_decides(recipe: Any) -> dict[str, Any]:
    """Those settings of a recipe, a dataclass, that decide what is learnt: all but how often a run looks and saves."""
    return {name: value for name, value in dataclasses.asdict(recipe).items() if not name.endswith("_every")}


def shuffled_batches(count: int, schedule: Schedule, seed: int, steps_done: int) -> Iterator[tuple[int, Tensor]]:
    """(step, rows) of the steps that are left, of `count` rows; the first step of a run is 1. Shuffled anew in each
    pass, whose last rows are left out where they fill no batch; ValueError where there are too few for one."""
    size = schedule.batch_size
    if count < size:
        raise UserError(f"{count} pictures to train on; batch_size={size} needs as many")

    def endless() -> Iterator[Tensor]:
        for epoch in itertools.count():
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
            yield from order[: count - count % size].split(size)

    return itertools.islice(enumerate(endless(), start=1), steps_done, schedule.steps)
