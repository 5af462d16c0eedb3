"""PricedModel: what the calculator can price."""

from dataclasses import dataclass, field

from dalle_lean.memory.cost import Cost, cost_of
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.memory.shape_cost import shape_cost
from dalle_lean.memory.shapes import TransformerShape
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan


@dataclass(frozen=True)
class PricedModel:
    """A model, with its recipe's plan, setup and precision if it has one."""

    name: str
    model: DalleConfig | TransformerShape
    plan: MemoryPlan = field(default_factory=MemoryPlan)
    setup: TrainingSetup = field(default_factory=TrainingSetup)
    precision: str = "fp32"

    @property
    def tokens(self) -> int:
        """Positions of a sample."""
        return self.model.sequence_len if isinstance(self.model, DalleConfig) else self.model.tokens

    def cost(self, plan: MemoryPlan, setup: TrainingSetup) -> Cost:
        if isinstance(self.model, DalleConfig):
            return cost_of(self.model, plan, setup)
        return shape_cost(self.model, plan, setup)
