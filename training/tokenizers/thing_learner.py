"""How a classifier of things learns: what is cut out is moved, turned, recoloured and blurred, so that a drawing of
another hand is known too.

Shapes: B pictures of a batch, S side in pixels.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dalle_lean.errors import UserError
from dalle_lean.images.thing_classifier import SIDES, ThingClassifier
from dalle_lean.optim.lamb import parameter_groups
from training.data.pixels import Pixels
from training.run.schedule import cosine_rate
from training.step.precision import autocast
from training.tokenizers.loop import guarded_step, shuffled_batches


@dataclass(frozen=True, kw_only=True)
class ThingRecipe:
    """How a classifier is built and trained."""

    picture_side: int = 64
    """Pixels."""
    steps: int = 6000
    batch_size: int = 64
    lr: float = 2e-3
    """At its peak, after the warm-up; from there half a cosine down to 0."""
    warmup_share: float = 0.05
    """Of the steps."""
    weight_decay: float = 0.05
    """Not for biases and norms."""
    label_smoothing: float = 0.1
    clip_grad_norm: float = 5.0
    max_skipped_in_row: int = 20
    """So many non-finite steps in a row end the run."""
    precision: str = "bf16"
    """"bf16" (autocast) or "fp32"."""
    heldout_pictures: int = 512
    """At most so many are measured."""
    seed: int = 0
    log_every: int = 20
    """Steps."""
    heldout_every: int = 500
    """Steps."""
    checkpoint_every: int = 100
    """Steps."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least = {"seed": 0, "batch_size": 2}.get(name, 1)
            if isinstance(value, int) and value < least:
                raise UserError(f"{name}={value}: must be at least {least}")
            if name in ("warmup_share", "label_smoothing") and not 0 <= value < 1:
                raise UserError(f"{name}={value}: must be in 0..1")
        if self.picture_side not in SIDES:
            raise UserError(f"picture_side={self.picture_side}: must be in {SIDES[0]}..{SIDES[-1]}")
        if self.precision not in ("bf16", "fp32"):
            raise UserError(f"precision={self.precision!r}: must be bf16 or fp32")
        if not 0 < self.lr < 1:
            raise UserError(f"lr={self.lr}: must be between 0 and 1")

    def learning_rate(self, step: int) -> float:
        """At a step, the first being 1."""
        return cosine_rate(step, peak=self.lr, warmup_share=self.warmup_share, total_steps=self.steps)


class ThingLearner:
    """The steps of a run. What step i does depends on recipe, data, weights and i alone, not on the process.

    Args:
        pixels: uint8 [N, 3, S, S], things cut out.
        labels: [N], the rows of these things in `classifier`.
    """

    def __init__(self, recipe: ThingRecipe, classifier: ThingClassifier, pixels: Pixels, labels: Tensor):
        self.recipe, self.classifier, self.pixels, self.labels = recipe, classifier, pixels, labels
        self.optimizer = torch.optim.AdamW(parameter_groups(classifier.model, recipe.weight_decay))

    def batches(self, steps_done: int) -> Iterator[tuple[int, Tensor]]:
        """(step, rows) of the steps that are left; the first step of a run is 1."""
        return shuffled_batches(len(self.pixels), self.recipe, self.recipe.seed, steps_done)

    def step(self, step: int, rows: Tensor) -> dict[str, float]:
        """Learn from these rows, as `guarded_step` tells."""
        recipe, model, device = self.recipe, self.classifier.model, self.classifier.device
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        pixels = self.classifier.prepare(other_hand(self.pixels[rows].float(), generator))

        def loss_of() -> Tensor:
            with autocast(device.type, recipe.precision):
                logits = model(pixels)
            return F.cross_entropy(logits.float(), self.labels[rows].to(device), label_smoothing=recipe.label_smoothing)

        lr = recipe.learning_rate(step)
        return guarded_step(model, self.optimizer, loss_of, lr=lr, clip_grad_norm=recipe.clip_grad_norm)


def other_hand(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture [B, 3, S, S] in 0..255 a little turned (10 degrees), scaled (15 %), moved (6 %); seven of ten with
    mixed channels, lighter or darker, which may leave 0..255; three of ten blurred.

    No mirroring: arrows and hands have sides.
    """
    count = len(pixels)

    def uniform(*size: int) -> Tensor:
        return torch.rand(count, *size, generator=generator) * 2 - 1

    def some(share: float) -> Tensor:
        return torch.rand(count, 1, 1, 1, generator=generator) < share

    angle, scale = 0.17 * uniform(), 1 + 0.15 * uniform()
    theta = torch.stack(
        [
            torch.stack([angle.cos() * scale, -angle.sin() * scale], dim=1),
            torch.stack([angle.sin() * scale, angle.cos() * scale], dim=1),
        ],
        dim=1,
    )
    theta = torch.cat([theta, 0.12 * uniform(2)[:, :, None]], dim=2)  # in grid units the side is 2
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    mixing = torch.eye(3) + 0.2 * torch.randn(count, 3, 3, generator=generator)
    lighter = 25 * torch.randn(count, 3, 1, 1, generator=generator)
    mixed = torch.einsum("bij,bjhw->bihw", mixing, moved - 127.5) + 127.5 + lighter
    found = torch.where(some(0.7), mixed, moved)
    return torch.where(some(0.3), F.avg_pool2d(found, 3, stride=1, padding=1, count_include_pad=False), found)
