"""What a model costs, and how memory is traded for time."""

from dalle_lean.memory.plan import MemoryPlan

__all__ = ["MemoryPlan"]
