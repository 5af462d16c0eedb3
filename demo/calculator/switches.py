"""What the calculator's page can switch, and the cost of a model without and with it."""

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dalle_lean import DalleConfig
from dalle_lean.errors import UserError
from dalle_lean.memory.plan_search import describe
from dalle_lean.memory.priced_model import PricedModel
from dalle_lean.memory.published_models import PRESETS
from dalle_lean.memory.report import CostReport, report_cost
from dalle_lean.memory.shape_cost import SHAPE_ACTIVATIONS
from dalle_lean.model.memory_plan import ACTIVATIONS, MemoryPlan
from training.run.recipe import recipe_names
from training.run.subjects import find_subject

OWN_SHARING = "as in the recipe"
NO_SHARING = "none"
SETS_OF_WEIGHTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Switches:
    """How a model is trained; the defaults are the plain way.

    Args:
        precision, optimizer: by the calculator's names for them.
        offload: the optimizer's statistics are on the CPU; LAMB only.
        activations: as a MemoryPlan has them; "reversible" makes a DALL-E reversible too, the others make it not so.
        sharing: sets of weights that layers take in turns, `NO_SHARING` or `OWN_SHARING`.
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


def own_switches(name: str) -> Switches:
    """How a recipe trains its model; a published model has the plain way."""
    subject = find_subject(name)
    if name in PRESETS or not isinstance(subject.model, DalleConfig):
        return PLAIN
    offload = subject.setup.is_lamb and subject.plan.offload_optimizer
    activations = subject.plan.activations_for(subject.model)
    return Switches(subject.precision, subject.setup.optimizer, offload, activations, own_sharing(subject))


def own_sharing(subject: PricedModel) -> str:
    """The model's sharing by the page's names."""
    shared = subject.model.shared_blocks
    if isinstance(shared, tuple):
        shared = None if len(set(shared)) == len(shared) else shared
    if shared is None:
        return NO_SHARING
    return str(shared) if shared in SETS_OF_WEIGHTS else OWN_SHARING


def sharing_choices(name: str) -> list[str]:
    """The sharing that a model can have: layers that share weights need the same kind of attention."""
    subject = find_subject(name)
    allowed = [NO_SHARING]
    for count in SETS_OF_WEIGHTS:
        try:
            dataclasses.replace(subject.model, shared_blocks=count)
        except UserError:
            continue
        allowed.append(str(count))
    return allowed if own_sharing(subject) in allowed else [*allowed, OWN_SHARING]


def activation_choices(name: str) -> list[str]:
    """From the plain one to the leanest."""
    own = (*ACTIVATIONS[False], *ACTIVATIONS[True])
    known = own if isinstance(find_subject(name).model, DalleConfig) else SHAPE_ACTIVATIONS
    return sorted(set(known), key=own.index)


@lru_cache(maxsize=256)
def report_with(
    name: str, switches: Switches, budget_gb: float, *, batch: int | None = None, tokens: int | None = None
) -> CostReport:
    """The cost under these switches, and the largest batch within `budget_gb` (1e9 bytes).

    batch: samples at once; None is the recipe's micro-batch. tokens: of a sample, of published transformers.

    Raises:
        ValueError: in a sentence, what the trainer would refuse.
    """
    if not 0 < budget_gb < float("inf"):
        raise UserError(f"a GPU of {budget_gb:g} GB: write its memory as a number above 0")
    if switches.offload and not switches.optimizer.startswith("lamb"):
        raise UserError("only LAMB can be offloaded: choose it, or leave the optimizer on the GPU")
    own = find_subject(name)
    fields: dict[str, Any] = {} if tokens is None else {"tokens": tokens}
    if isinstance(own.model, DalleConfig):
        fields["reversible"] = switches.activations == "reversible"
    if switches.sharing != OWN_SHARING:
        fields["shared_blocks"] = None if switches.sharing == NO_SHARING else int(switches.sharing)
    base = MemoryPlan(loss_tokens=None) if switches == PLAIN else own.plan  # plain: everything at once
    plan = dataclasses.replace(base, activations=switches.activations, offload_optimizer=switches.offload)
    subject = find_subject(
        name, precision=switches.precision, optimizer=switches.optimizer, plan=describe(plan), model=fields
    )
    setup = subject.setup if batch is None else dataclasses.replace(subject.setup, batch=batch)
    return report_cost(subject, setup=setup, plan=describe(plan), budget=f"{budget_gb:f}GB")
