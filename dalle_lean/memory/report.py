"""What the calculator can price, and its report, as lines for people and as a dictionary for programs."""

import dataclasses
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.memory.cost import Cost, cost_of
from dalle_lean.memory.plan_search import describe, fastest_plan, first_that_fits, largest_batch
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.memory.shape_cost import shape_cost
from dalle_lean.memory.shapes import TransformerShape
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan
from dalle_lean.words import human, human_bytes


@dataclasses.dataclass(frozen=True)
class PricedModel:
    """A model, with its recipe's plan, setup and precision, or plain ones."""

    name: str
    model: DalleConfig | TransformerShape
    plan: MemoryPlan
    setup: TrainingSetup
    precision: str

    @property
    def tokens(self) -> int:
        """Positions of a sample."""
        return self.model.sequence_len if isinstance(self.model, DalleConfig) else self.model.tokens

    def cost(self, plan: MemoryPlan, setup: TrainingSetup) -> Cost:
        if isinstance(self.model, DalleConfig):
            return cost_of(self.model, plan, setup)
        return shape_cost(self.model, plan, setup)


@dataclasses.dataclass(frozen=True)
class CostReport:
    """A model's cost, and what the budget allows."""

    priced: PricedModel
    plan: MemoryPlan
    setup: TrainingSetup
    cost: Cost
    budget_bytes: float | None
    largest_batch: int | None
    """With this plan in the budget; 0 if not even one sample fits, None without a budget."""
    tflops: float | None

    @property
    def seconds(self) -> float | None:
        """Duration of a step at the given TFLOP/s; None without them."""
        return self.cost.step.total / (self.tflops * 1e12) if self.tflops else None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; bytes, FLOP and seconds."""
        return {
            "model": self.priced.name,
            "tokens": self.priced.tokens,
            "precision": self.priced.precision,
            "plan": dataclasses.asdict(self.plan),
            "setup": dataclasses.asdict(self.setup),
            **self.cost.to_dict(),
            "budget_bytes": self.budget_bytes,
            "largest_batch": self.largest_batch,
            "step_seconds": self.seconds,
        }


def report_cost(
    priced: PricedModel,
    *,
    setup: TrainingSetup,
    plan: MemoryPlan | None = None,
    budget_bytes: float | None = None,
    tflops: float | None = None,
) -> CostReport:
    """The cost under `plan`; if None, under the fastest plan that fits the budget, or without one the model's own.

    Raises:
        ValueError: the model does not support the plan, or no plan fits the budget.
    """
    if tflops is not None and not 0 < tflops < float("inf"):
        raise UserError(f"--tflops {tflops}: must be a finite number above 0")
    chosen = plan or priced.plan
    if plan is None and budget_bytes is not None:
        chosen = plan_within(priced, chosen, setup, budget_bytes)
    if not setup.is_lamb:  # only LAMB supports these
        chosen = dataclasses.replace(chosen, offload_optimizer=False, master_weights=False)

    def peak_of(batch: int) -> int:
        return priced.cost(chosen, dataclasses.replace(setup, batch=batch)).peak_bytes

    most = None if budget_bytes is None else largest_batch(peak_of, budget_bytes)
    return CostReport(priced, chosen, setup, priced.cost(chosen, setup), budget_bytes, most, tflops)


def plan_within(priced: PricedModel, own: MemoryPlan, setup: TrainingSetup, budget_bytes: float) -> MemoryPlan:
    """The fastest plan that fits; for a published transformer `own`, or the same with checkpoints."""
    if isinstance(priced.model, DalleConfig):
        return fastest_plan(priced.model, setup, budget_bytes, fused_attention=own.fused_attention)
    plans = [own, dataclasses.replace(own, activations="checkpoint")]
    return first_that_fits(plans, priced.cost, setup, budget_bytes, of=f"{priced.name} at ")


def report_lines(report: CostReport) -> list[str]:
    """A table of bytes by kind, then arithmetic, time and the largest batch."""
    cost, setup = report.cost, report.setup
    offloaded = cost.host.total > 0
    columns = {"device": cost.device.by_kind(), **({"host": cost.host.by_kind()} if offloaded else {})}
    lines = [
        f"{report.priced.name}: {cost.parameters:,} parameters, {report.priced.tokens} tokens a sample",
        f"batch {setup.batch}, {report.priced.precision}, {setup.optimizer}, plan {describe(report.plan)}",
        "",
        row("", *columns),
    ]
    for kind in cost.device.by_kind():
        values = [column[kind] for column in columns.values()]
        if any(values):
            lines.append(row(kind, *(human_bytes(value) if value else "-" for value in values)))
    totals = [cost.device.total, *([cost.host.total] if offloaded else [])]
    lines += [row("sum at the peak", *(human_bytes(total) for total in totals)), ""]
    lines.append(f"memory peaks in the {cost.moment}")
    forward, step = (human(flop.total, "FLOP") for flop in (cost.forward, cost.step))
    lines.append(f"forward {forward}, forward and backward {step}")
    if report.seconds is not None:
        lines.append(f"a step takes {report.seconds:.3g} s at {report.tflops:g} TFLOP/s")
    if report.budget_bytes is not None:
        lines.append(f"largest batch in {human_bytes(report.budget_bytes)} with this plan: {report.largest_batch}")
    return lines


def row(name: str, *values: str) -> str:
    return f"{name:<40}" + "".join(f"{value:>12}" for value in values)
