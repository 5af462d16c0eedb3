"""PricedModel: what the calculator can price."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.memory.cost import Cost, cost_of
from dalle_lean.memory.published_models import PRESETS
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.memory.shape_cost import shape_cost
from dalle_lean.memory.shapes import TransformerShape
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan


@dataclass(frozen=True)
class PricedModel:
    """A model, and how its recipe trains it where there is one."""

    name: str
    model: DalleConfig | TransformerShape
    plan: MemoryPlan = field(default_factory=MemoryPlan)
    setup: TrainingSetup = field(default_factory=TrainingSetup)
    precision: str = "fp32"

    @property
    def tokens(self) -> int:
        """Positions of a sample."""
        return self.model.sequence_len if isinstance(self.model, DalleConfig) else self.model.tokens

    def changed(self, *, tokens: int | None, shared_blocks: int | None) -> "PricedModel":
        """With samples of another length (published transformers only) and other sharing of weights."""
        fields = {"tokens": tokens, "shared_blocks": shared_blocks}
        wanted: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        if isinstance(self.model, DalleConfig) and tokens is not None:
            raise UserError(f"--tokens {tokens}: a sample of {self.name} always has {self.tokens}")
        return dataclasses.replace(self, model=dataclasses.replace(self.model, **wanted)) if wanted else self

    def cost(self, plan: MemoryPlan, setup: TrainingSetup) -> Cost:
        """The cost of one step."""
        if isinstance(self.model, DalleConfig):
            return cost_of(self.model, plan, setup)
        return shape_cost(self.model, plan, setup)


def of_preset(name: str) -> PricedModel:
    """A published transformer, with all activations kept."""
    return PricedModel(name, PRESETS[name], MemoryPlan(activations="keep", loss_tokens=None))
