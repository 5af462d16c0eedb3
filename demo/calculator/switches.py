"""The settings on the calculator's page, and what a model costs with them."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dalle_lean import DalleConfig
from dalle_lean.errors import UserError
from dalle_lean.memory.published_models import PRESETS
from dalle_lean.memory.report import CostReport, PricedModel, report_cost
from dalle_lean.memory.shape_cost import SHAPE_ACTIVATIONS
from dalle_lean.model.memory_plan import ACTIVATIONS, MemoryPlan
from training.run.recipe import recipe_names
from training.run.subjects import find_subject

RECIPE_SHARING = "as in the recipe"
NO_SHARING = "none"
SETS_OF_WEIGHTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Switches:
    """How a model is trained; the defaults are the plain way.

    Args:
        precision, optimizer: the calculator's names for them.
        offload: keep the optimizer's statistics on the CPU; LAMB only.
        activations: as in MemoryPlan; "reversible" also makes a DALL-E reversible, the others make it sequential.
        sharing: number of weight sets that the layers share, `NO_SHARING` or `RECIPE_SHARING`.
    """

    precision: str = "fp32"
    optimizer: str = "adamw"
    offload: bool = False
    activations: str = "keep"
    sharing: str = NO_SHARING


PLAIN = Switches()


def model_names() -> list[str]:
    """Published models and recipes."""
    return [*PRESETS, *recipe_names()]


def default_switches(name: str) -> Switches:
    """How a recipe trains its model; PLAIN for published models."""
    subject = find_subject(name)
    if name in PRESETS or not isinstance(subject.model, DalleConfig):
        return PLAIN
    offload = subject.setup.is_lamb and subject.plan.offload_optimizer
    activations = subject.plan.activations_for(subject.model)
    return Switches(subject.precision, subject.setup.optimizer, offload, activations, default_sharing(subject))


def default_sharing(subject: PricedModel) -> str:
    """The model's sharing, under its name on the page."""
    shared = subject.model.shared_blocks
    if isinstance(shared, tuple):
        shared = None if len(set(shared)) == len(shared) else shared
    if shared is None:
        return NO_SHARING
    return str(shared) if shared in SETS_OF_WEIGHTS else RECIPE_SHARING


def sharing_choices(name: str) -> list[str]:
    """The sharing that a model allows: layers that share weights need the same kind of attention."""
    subject = find_subject(name)
    allowed = [NO_SHARING]
    for count in SETS_OF_WEIGHTS:
        try:
            dataclasses.replace(subject.model, shared_blocks=count)
        except UserError:
            continue
        allowed.append(str(count))
    return allowed if default_sharing(subject) in allowed else [*allowed, RECIPE_SHARING]


def activation_choices(name: str) -> list[str]:
    """What a model can do with its activations, from the plainest to the leanest."""
    every = (*ACTIVATIONS[False], *ACTIVATIONS[True])
    allowed = every if isinstance(find_subject(name).model, DalleConfig) else SHAPE_ACTIVATIONS
    return sorted(set(allowed), key=every.index)


@lru_cache(maxsize=256)
def report_with(
    name: str, switches: Switches, budget_gb: float, *, batch: int | None = None, tokens: int | None = None
) -> CostReport:
    """The cost with these switches, and the largest batch within `budget_gb` (1e9 bytes).

    batch: in samples; None is the recipe's micro-batch. tokens: per sample, for published transformers.

    Raises:
        UserError: the trainer would refuse these settings.
    """
    if switches.offload and not switches.optimizer.startswith("lamb"):
        raise UserError("only LAMB can be offloaded: choose it, or keep the optimizer on the GPU")
    default = find_subject(name)
    fields: dict[str, Any] = {} if tokens is None else {"tokens": tokens}
    if isinstance(default.model, DalleConfig):
        fields["reversible"] = switches.activations == "reversible"
    if switches.sharing != RECIPE_SHARING:
        fields["shared_blocks"] = None if switches.sharing == NO_SHARING else int(switches.sharing)
    base = MemoryPlan(loss_tokens=None) if switches == PLAIN else default.plan
    plan = dataclasses.replace(base, activations=switches.activations, offload_optimizer=switches.offload)
    subject = find_subject(name, precision=switches.precision, optimizer=switches.optimizer, plan=plan, model=fields)
    setup = subject.setup if batch is None else dataclasses.replace(subject.setup, batch=batch)
    return report_cost(subject, setup=setup, plan=plan, budget_bytes=budget_gb * 1e9)
