"""What the calculator answers, as lines for people and as a dictionary for programs."""

import dataclasses
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.memory.cost import Cost
from dalle_lean.memory.plan_search import describe, fastest_plan, human_bytes, largest_batch, parse_bytes, parse_plan
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.memory.subjects import Subject
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan


@dataclasses.dataclass(frozen=True)
class Answer:
    """A subject's cost, and what the budget allows."""

    subject: Subject
    plan: MemoryPlan
    setup: TrainingSetup
    cost: Cost
    budget_bytes: float | None
    largest_batch: int | None
    """With this plan in the budget; 0 if not even one sample fits."""
    tflops: float | None

    @property
    def seconds(self) -> float | None:
        """Of a step, at the given TFLOP/s."""
        return self.cost.step.total / (self.tflops * 1e12) if self.tflops else None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; bytes, FLOP and seconds."""
        return {
            "model": self.subject.name,
            "tokens": self.subject.tokens,
            "precision": self.subject.precision,
            "plan": dataclasses.asdict(self.plan),
            "setup": dataclasses.asdict(self.setup),
            **self.cost.to_dict(),
            "budget_bytes": self.budget_bytes,
            "largest_batch": self.largest_batch,
            "step_seconds": self.seconds,
        }


def answer(
    subject: Subject,
    *,
    setup: TrainingSetup,
    plan: str | None = None,
    budget: str | None = None,
    tflops: float | None = None,
) -> Answer:
    """The cost under `plan`; without one, under the fastest that fits `budget`, or under the subject's own.

    Raises:
        ValueError: a malformed plan or budget, a plan that the model cannot have, a budget that no plan fits.
    """
    if tflops is not None and not 0 < tflops < float("inf"):
        raise UserError(f"--tflops {tflops}: must be a finite number above 0")
    budget_bytes = None if budget is None else parse_bytes(budget)
    chosen = subject.plan if plan is None else parse_plan(plan)
    if plan is None and budget_bytes is not None:
        chosen = plan_within(subject, chosen, setup, budget_bytes)
    if not setup.is_lamb:  # the only one with these
        chosen = dataclasses.replace(chosen, offload_optimizer=False, master_weights=False)

    def peak_of(batch: int) -> int:
        return subject.cost(chosen, dataclasses.replace(setup, batch=batch)).peak_bytes

    most = None if budget_bytes is None else largest_batch(peak_of, budget_bytes)
    return Answer(subject, chosen, setup, subject.cost(chosen, setup), budget_bytes, most, tflops)


def plan_within(subject: Subject, own: MemoryPlan, setup: TrainingSetup, budget_bytes: float) -> MemoryPlan:
    """The fastest plan that fits; a published transformer has its own, or one with checkpoints."""
    if isinstance(subject.model, DalleConfig):
        return fastest_plan(subject.model, setup, budget_bytes)
    plans = [own, dataclasses.replace(own, activations="checkpoint")]
    peaks = [subject.cost(plan, setup).peak_bytes for plan in plans]
    for plan, peak in zip(plans, peaks, strict=True):
        if peak <= budget_bytes:
            return plan
    raise UserError(
        f"{subject.name} at batch {setup.batch} needs at least {human_bytes(min(peaks))} of the "
        f"{human_bytes(budget_bytes)} allowed: take a smaller --batch, fewer --tokens or --precision bf16-weights"
    )


def lines_of(found: Answer) -> list[str]:
    """A table of bytes by kind, then arithmetic, time and the largest batch."""
    cost, setup = found.cost, found.setup
    offloaded = cost.host.total > 0
    columns = {"device": cost.device.by_kind(), **({"host": cost.host.by_kind()} if offloaded else {})}
    lines = [
        f"{found.subject.name}: {cost.parameters:,} parameters, {found.subject.tokens} tokens a sample",
        f"batch {setup.batch}, {found.subject.precision}, {setup.optimizer}, plan {describe(found.plan)}",
        "",
        row("", *columns),
    ]
    for kind in cost.device.by_kind():
        values = [column[kind] for column in columns.values()]
        if any(values):
            lines.append(row(kind.replace("_", " "), *(human_bytes(value) if value else "-" for value in values)))
    totals = [cost.device.total, *([cost.host.total] if offloaded else [])]
    lines += [row("sum at the peak", *(human_bytes(total) for total in totals)), ""]
    lines.append(f"the peak is in: {cost.moment}")
    lines.append(f"forward {human_flop(cost.forward.total)}, forward and backward {human_flop(cost.step.total)}")
    if found.seconds is not None:
        lines.append(f"a step takes {found.seconds:.3g} s at {found.tflops:g} TFLOP/s")
    if found.budget_bytes is not None:
        lines.append(f"largest batch in {human_bytes(found.budget_bytes)} with this plan: {found.largest_batch}")
    return lines


def row(name: str, *values: str) -> str:
    """A line of the table."""
    return f"{name:<18}" + "".join(f"{value:>12}" for value in values)


def human_flop(count: float) -> str:
    """3 digits with the decimal unit: 11.5 TFLOP."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PFLOP"
