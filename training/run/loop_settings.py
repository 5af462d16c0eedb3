"""What the training loop reads from a recipe, and what the recipes for pictures share. Imports no torch: --help is
fast."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from dalle_lean.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the training loop reads from a recipe."""

    steps: int
    batch_size: int
    max_skipped_in_row: int = 20
    """Consecutive non-finite steps that end the run."""
    log_every: int
    """Interval in steps, like the two below; the last step is always logged, measured and saved."""
    heldout_every: int
    checkpoint_every: int


@dataclass(frozen=True, kw_only=True)
class PictureRecipe(LoopSettings):
    """What the recipes for pictures share. ValueError for an integer below its minimum, an unknown precision, or a
    learning rate outside 0..1."""

    MINIMUM: ClassVar[dict[str, int]] = {}
    """Of the integers whose minimum is not 1."""

    lr: float
    """Peak, reached after the warm-up."""
    clip_grad_norm: float = 1.0
    precision: str = "bf16"
    """"bf16" (autocast) or "fp32"."""
    heldout_pictures: int = 512
    """Held-out pictures to measure, at most."""
    seed: int = 0

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            minimum = {"seed": 0, **self.MINIMUM}.get(spec.name, 1)
            if spec.type is int and value < minimum:
                raise UserError(f"{spec.name}={value}: must be at least {minimum}")
        if self.precision not in ("bf16", "fp32"):
            raise UserError(f"precision={self.precision!r}: must be bf16 or fp32")
        if not 0 < self.lr < 1:
            raise UserError(f"lr={self.lr}: must be between 0 and 1")

    def identity(self) -> dict[str, Any]:
        """The settings that affect what is learnt: all but the intervals."""
        return {name: value for name, value in dataclasses.asdict(self).items() if not name.endswith("_every")}
