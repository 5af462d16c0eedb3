"""What a model costs, and how memory is traded for time."""

from dalle_lean.memory.cost import Cost, cost_of
from dalle_lean.memory.peak_memory import Bytes
from dalle_lean.memory.plan_search import fastest_plan, largest_batch
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.model.memory_plan import MemoryPlan

__all__ = ["Bytes", "Cost", "MemoryPlan", "TrainingSetup", "cost_of", "fastest_plan", "largest_batch"]
