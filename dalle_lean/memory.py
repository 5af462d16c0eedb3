"""MemoryPlan: what trades memory for time and never changes the result beyond rounding."""

from dataclasses import dataclass

from dalle_lean.config import DalleConfig


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a model computes its backward; apart from DalleConfig and never saved with the weights.

    Args:
        activations: where backward gets a layer's activations. "keep": stored in forward. "reversible": rebuilt from
            the layer's outputs, nothing is stored (reversible configs only). None: the leanest that the config allows.
    """

    activations: str | None = None

    def __post_init__(self) -> None:
        if self.activations not in (None, "keep", "reversible"):
            raise ValueError(f"activations={self.activations!r}: must be keep or reversible")

    def activations_for(self, config: DalleConfig) -> str:
        """The choice for this config; ValueError where the config cannot have it."""
        if self.activations is None:
            return "reversible" if config.reversible else "keep"
        if self.activations == "reversible" and not config.reversible:
            raise ValueError("activations='reversible' needs a config with reversible=True; this one takes keep")
        return self.activations
