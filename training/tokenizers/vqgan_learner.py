"""The steps in which a VQGAN learns (Esser et al. 2021, arXiv 2012.09841), without downloaded weights.

Shapes: B pictures of a batch, S side in pixels.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.require import require
from training.run.schedule import learning_rate
from training.step.buffer_snapshot import remember
from training.step.precision import autocast
from training.tokenizers.codebook import NearestLearner, codebook_learner

EMOJI = VQGANConfig(
    quantizer="vq",
    codebook_size=1024,
    code_width=16,
    z_channels=64,
    channels=32,
    channel_multipliers=(1, 1, 2, 4),
    num_res_blocks=1,
    attention_resolutions=(),
    picture_side=64,
    norm_groups=8,
)
"""2.9 M weights for drawings of 64x64 pixels: 8x8 codes."""

CROPS_TRIED = 4


@dataclass(frozen=True, kw_only=True)
class VQGANRecipe:
    """How a VQGAN is built and trained."""

    config: VQGANConfig = EMOJI
    steps: int = 10_000
    batch_size: int = 16
    lr: float = 1e-3
    """At its peak, after the warm-up; from there linearly down to 0."""
    warmup_steps: int = 200
    clip_grad_norm: float = 1.0
    max_skipped_in_row: int = 20
    """So many non-finite steps in a row end the run."""
    squared_weight: float = 1.0
    """Of the mean squared error beside the mean absolute error, pixels in -1..1."""
    discriminator_start: float = 0.6
    """Share of the steps before the discriminator joins; 1 leaves it out."""
    discriminator_weight: float = 0.1
    """Size of its gradient on the pixels, as a share of the reconstruction's."""
    discriminator_channels: int = 32
    discriminator_layers: int = 2
    crop_from: int | None = None
    """Side in pixels at which pictures are read to learn from crops of config.picture_side, the busiest of CROPS_TRIED;
    None: whole pictures."""
    flip: bool = False
    """Mirror half of the pictures. Not where captions will speak of left and right."""
    precision: str = "bf16"
    """"bf16" (autocast) or "fp32"."""
    heldout_pictures: int = 512
    """At most so many are measured."""
    seed: int = 0
    log_every: int = 50
    """Steps."""
    heldout_every: int = 500
    """Steps."""
    checkpoint_every: int = 250
    """Steps."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "max_skipped_in_row",
            "heldout_pictures",
            "log_every",
            "heldout_every",
            "checkpoint_every",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.precision not in ("bf16", "fp32"):
            raise UserError(f"precision={self.precision!r}: must be bf16 or fp32")
        if not 0 < self.lr < 1:
            raise UserError(f"lr={self.lr}: must be in 0..1")
        if self.crop_from is not None and self.crop_from < self.config.picture_side:
            raise UserError(f"crop_from={self.crop_from}: must be at least picture_side={self.config.picture_side}")
        if not 0 <= self.discriminator_start <= 1:
            raise UserError(f"discriminator_start={self.discriminator_start}: must be in 0..1")


class VQGANLearner(nn.Module):
    """Everything that learns. What step i does depends on the recipe, the data and i alone, not on the process."""

    def __init__(self, recipe: VQGANRecipe):
        super().__init__()
        self.recipe = recipe
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.vqgan = VQGAN(recipe.config)
            self.discriminator = new_discriminator(recipe)
        self.codebook = codebook_learner(self.vqgan.quantize)
        self.learning = [parameter for parameter in self.vqgan.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(
            [
                {"params": self.learning, "betas": (0.9, 0.99)},
                {"params": list(self.discriminator.parameters()), "betas": (0.5, 0.9)},
            ],
            lr=recipe.lr,
            fused=True,
        )

    def begin_with(self, first: VQGAN) -> None:
        """Take the weights of another VQGAN; ValueError unless it differs in nothing but the side of its pictures."""
        config = self.vqgan.config
        wanted = asdict(replace(config, picture_side=first.config.picture_side))
        found = asdict(first.config)
        if different := [
            f"{name}={found[name]} and not {wanted[name]}" for name in wanted if wanted[name] != found[name]
        ]:
            raise UserError(f"the VQGAN to begin with has {', '.join(different)}: leave that option out")
        self.vqgan.load_state_dict(first.state_dict())
        if isinstance(self.codebook, NearestLearner):
            table = self.vqgan.quantize.table.clone()
            vectors_per_step = self.recipe.batch_size * config.image_side**2
            self.codebook.place(torch.arange(len(table), device=table.device), table, vectors_per_step)

    def step(self, step: int, pixels: Tensor) -> dict[str, float]:
        """Learn from pictures [B, 3, S, S] uint8 -> losses, and norms of gradients before clipping.

        `step` counts from 1. Where one of the numbers is not finite, nothing is changed.
        """
        recipe = self.recipe
        put_back = remember(self)
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        done = (step - 1) / recipe.steps
        rate = learning_rate(step, peak=recipe.lr, warmup_steps=recipe.warmup_steps, total_steps=recipe.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        device = self.vqgan.quant_conv.weight.device
        if recipe.crop_from is not None:
            pixels = busiest_crops(pixels, recipe.config.picture_side, recipe.config.downscale, generator)
        original = pixels.to(device).float() / 127.5 - 1
        if recipe.flip:
            mirrored = torch.rand(len(pixels), generator=generator) < 0.5
            original[mirrored] = original[mirrored].flip(dims=[3])

        with self.arithmetic():
            z = self.vqgan.latents(original)
        quantized, codebook_loss = self.codebook(z.float(), done, generator)
        with self.arithmetic():
            reconstruction = self.vqgan.pixels(quantized).float()

        # Both judges speak through the gradient on the pixels, where their shares can be weighed.
        seen = reconstruction.detach().requires_grad_()
        absolute, squared = F.l1_loss(seen, original), F.mse_loss(seen, original)
        loss = absolute + recipe.squared_weight * squared
        (pixel_gradient,) = torch.autograd.grad(loss, seen)
        losses = {"loss": loss + codebook_loss, "absolute": absolute, "squared": squared, "codebook": codebook_loss}
        self.optimizer.zero_grad()
        if done >= recipe.discriminator_start:
            with self.arithmetic():
                (adversarial,) = torch.autograd.grad(-self.discriminator(seen).float().mean(), seen)
                verdicts = self.discriminator(original).float(), self.discriminator(seen.detach()).float()
            hinge = (F.relu(1 - verdicts[0]).mean() + F.relu(1 + verdicts[1]).mean()) / 2
            hinge.backward()
            share = recipe.discriminator_weight * pixel_gradient.norm() / (adversarial.norm() + 1e-12)
            pixel_gradient = pixel_gradient + share * adversarial
            losses["discriminator"] = hinge
        torch.autograd.backward([reconstruction, codebook_loss], [pixel_gradient, None])
        losses["grad_norm"] = nn.utils.clip_grad_norm_(self.learning, recipe.clip_grad_norm)
        if "discriminator" in losses:
            gradients = [weight.grad for weight in self.discriminator.parameters() if weight.grad is not None]
            losses["discriminator_grad_norm"] = nn.utils.get_total_norm(gradients)
        numbers = {name: value.item() for name, value in losses.items()}
        if all(math.isfinite(number) for number in numbers.values()):
            self.optimizer.step()
        else:
            put_back()
        return numbers

    def arithmetic(self) -> AbstractContextManager[object]:
        """The precision of the networks; the codebook keeps float32."""
        return autocast(self.vqgan.quant_conv.weight.device.type, self.recipe.precision)


def busiest_crops(pixels: Tensor, side: int, step: int, generator: torch.Generator) -> Tensor:
    """Of each picture [B, 3, S, S] the crop [B, 3, side, side] with the largest variance of CROPS_TRIED random ones,
    whose corners are multiples of `step` pixels: plain grounds teach little."""
    places = (pixels.shape[-1] - side) // step + 1
    corners = step * torch.randint(places, (len(pixels), CROPS_TRIED, 2), generator=generator)
    chosen = []
    for picture, candidates in zip(pixels, corners.tolist(), strict=True):
        crops = torch.stack([picture[:, top : top + side, left : left + side] for top, left in candidates])
        chosen.append(crops[crops.float().flatten(1).var(dim=1).argmax()])
    return torch.stack(chosen)


def new_discriminator(recipe: VQGANRecipe) -> nn.Module:
    """The patch discriminator of taming-transformers, with the weights it starts from."""
    taming = require("taming.modules.discriminator.model", extra="training")
    discriminator: nn.Module = taming.NLayerDiscriminator(
        input_nc=3, ndf=recipe.discriminator_channels, n_layers=recipe.discriminator_layers
    )
    return discriminator.apply(taming.weights_init)
