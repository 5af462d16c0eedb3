"""What the training loop reads from a recipe, and what the recipes for pictures share. Imports no torch: --help is
fast."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from dalle_lean.fields import NonNegativeInt, PositiveInt, Range, check


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the training loop reads from a recipe."""

    steps: PositiveInt
    batch_size: PositiveInt
    max_skipped_in_row: PositiveInt = 20
    """Consecutive non-finite steps that end the run."""
    log_every: PositiveInt
    """Interval in steps, like the two below; all are due at the last step."""
    heldout_every: NonNegativeInt
    """0 means never."""
    checkpoint_every: NonNegativeInt
    """0 means at the end only."""


@dataclass(frozen=True, kw_only=True)
class PictureRecipe(LoopSettings):
    """What the recipes for pictures share. ValueError names a field whose value does not fit its annotation."""

    lr: Annotated[float, Range(above=0, below=1)]
    """Peak, reached after the warm-up."""
    clip_grad_norm: float = 1.0
    precision: Annotated[str, ("bf16", "fp32")] = "bf16"
    """"bf16" (autocast) or "fp32"."""
    heldout_pictures: PositiveInt = 512
    """Held-out pictures to measure, at most."""
    seed: NonNegativeInt = 0
    heldout_every: PositiveInt
    checkpoint_every: PositiveInt

    def __post_init__(self) -> None:
        check(self)

    def identity(self) -> dict[str, Any]:
        """The settings that affect what is learnt: all but the intervals."""
        return {name: value for name, value in dataclasses.asdict(self).items() if not name.endswith("_every")}
