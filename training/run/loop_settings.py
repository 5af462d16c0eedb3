"""What the training loop reads of a recipe, and what the recipes for pictures share. Free of torch, for --help."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from dalle_lean.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the training loop reads of a recipe."""

    steps: int
    """Optimizer steps in all."""
    batch_size: int
    max_skipped_in_row: int = 20
    """Non-finite steps in a row that end the run."""
    log_every: int
    """Steps, as for the intervals below; the last step is logged, measured and saved in any case."""
    heldout_every: int
    checkpoint_every: int


@dataclass(frozen=True, kw_only=True)
class PictureRecipe(LoopSettings):
    """ValueError for a whole number below its least, a share outside 0..1, and a precision or learning rate that is
    none."""

    LEAST: ClassVar[dict[str, int]] = {}
    """The smallest value of whole numbers for which it is not 1."""

    lr: float
    """At its peak, after the warm-up."""
    clip_grad_norm: float = 1.0
    precision: str = "bf16"
    """"bf16" (autocast) or "fp32"."""
    heldout_pictures: int = 512
    """At most this many are measured."""
    seed: int = 0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            least = {"seed": 0, **self.LEAST}.get(spec.name, 1)
            if spec.type is int and value < least:
                raise UserError(f"{spec.name}={value}: must be at least {least}")
        if self.precision not in ("bf16", "fp32"):
            raise UserError(f"precision={self.precision!r}: must be bf16 or fp32")
        if not 0 < self.lr < 1:
            raise UserError(f"lr={self.lr}: must be between 0 and 1")

    def identity(self) -> dict[str, Any]:
        """The settings that decide what is learnt: all but how often a run measures and saves."""
        return {name: value for name, value in dataclasses.asdict(self).items() if not name.endswith("_every")}
