"""How a classifier of things is built and trained. Imports no torch: --help is fast."""

from dataclasses import dataclass
from typing import Annotated

from dalle_lean.errors import UserError
from dalle_lean.fields import Range, Share
from training.run.loop_settings import PictureRecipe


@dataclass(frozen=True, kw_only=True)
class ThingRecipe(PictureRecipe):
    """How a classifier is built and trained. After its warm-up, the learning rate falls along half a cosine to 0."""

    picture_side: int = 64
    """Pixels."""
    steps: int = 6000
    batch_size: Annotated[int, Range(2)] = 64
    lr: float = 2e-3
    warmup_share: Share = 0.05
    """Of the steps."""
    weight_decay: float = 0.05
    """Not applied to biases and norms."""
    label_smoothing: Share = 0.1
    clip_grad_norm: float = 5.0
    log_every: int = 20
    heldout_every: int = 500
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        from dalle_lean.images.thing_classifier import SIDES

        super().__post_init__()
        if self.picture_side not in SIDES:
            raise UserError(f"picture_side={self.picture_side}: must be in {SIDES[0]}..{SIDES[-1]}")
