"""How a classifier of things learns: cut-out drawings are moved, turned, recoloured and blurred, so that it recognises
things in other styles too.

Shapes: B pictures of a batch, S side in pixels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from dalle_lean.images.thing_classifier import ThingClassifier
from dalle_lean.optim.lamb import parameter_groups
from training.data.pixels import Pixels
from training.run.schedule import cosine_rate
from training.step.guarded_step import guarded_step
from training.step.precision import autocast
from training.things.recipe import ThingRecipe


class ThingLearner:
    """The steps of a run. Step i depends on the recipe, the data, the weights and i alone, not on the process.

    Args:
        pixels: uint8 [N, 3, S, S], things cut out.
        labels: [N], the rows of these things in `classifier`.
    """

    def __init__(self, recipe: ThingRecipe, classifier: ThingClassifier, pixels: Pixels, labels: Tensor):
        self.recipe, self.classifier, self.pixels, self.labels = recipe, classifier, pixels, labels
        self.optimizer = torch.optim.AdamW(parameter_groups(classifier.model, recipe.weight_decay))

    def step(self, step: int, rows: Tensor) -> dict[str, float]:
        """Learn from these rows; see `guarded_step`."""
        recipe, model, device = self.recipe, self.classifier.model, self.classifier.device
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        pixels = self.classifier.prepare(augment(self.pixels[rows].float(), generator))

        def loss_of() -> Tensor:
            with autocast(device.type, recipe.precision):
                logits = model(pixels)
            return F.cross_entropy(logits.float(), self.labels[rows].to(device), label_smoothing=recipe.label_smoothing)

        lr = cosine_rate(step, peak=recipe.lr, warmup_share=recipe.warmup_share, total_steps=recipe.steps)
        return guarded_step(model, self.optimizer, loss_of, lr=lr, clip_grad_norm=recipe.clip_grad_norm)


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each picture [B, 3, S, S] in 0..255 turned (up to 10 degrees), scaled (15 %) and moved (6 %); seven of ten with
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
    drawn = torch.where(some(0.7), mixed, moved)
    return torch.where(some(0.3), F.avg_pool2d(drawn, 3, stride=1, padding=1, count_include_pad=False), drawn)
