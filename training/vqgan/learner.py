"""The training step of a VQGAN (Esser et al. 2021, arXiv 2012.09841), without downloaded weights.

Shapes: B pictures in a batch, S side in pixels.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN, NearestQuantizer
from dalle_lean.precision import autocast
from dalle_lean.require import require
from training.run.draws import step_generator
from training.run.rates import learning_rate
from training.step.guarded_step import snapshot
from training.vqgan.codebook import GumbelLearner, NearestLearner
from training.vqgan.recipe import CROPS_TRIED, VQGANRecipe


class VQGANLearner(nn.Module):
    """VQGAN, discriminator and optimizer. Random draws of step i follow from the seed and i alone."""

    def __init__(self, recipe: VQGANRecipe):
        super().__init__()
        self.recipe = recipe
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.vqgan = VQGAN(recipe.config)
            # The patch discriminator of taming-transformers, with its initial weights.
            taming = require("taming.modules.discriminator.model", extra="training")
            width, layers = recipe.discriminator_channels, recipe.discriminator_layers
            discriminator = taming.NLayerDiscriminator(input_nc=3, ndf=width, n_layers=layers)
            self.discriminator: nn.Module = discriminator.apply(taming.weights_init)
        quantizer = self.vqgan.quantize
        self.codebook: NearestLearner | GumbelLearner = (
            NearestLearner(quantizer) if isinstance(quantizer, NearestQuantizer) else GumbelLearner(quantizer)
        )
        if recipe.decoder_only:
            for part in (self.vqgan.encoder, self.vqgan.quant_conv, self.vqgan.quantize):
                part.requires_grad_(False)
        self.weights = [parameter for parameter in self.vqgan.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(
            [
                {"params": self.weights, "betas": (0.9, 0.99)},
                {"params": list(self.discriminator.parameters()), "betas": (0.5, 0.9)},
            ],
            lr=recipe.lr,
            fused=True,
        )

    def start_from(self, first: VQGAN) -> None:
        """Take the weights of another VQGAN; ValueError if its config differs in more than picture_side."""
        config = self.vqgan.config
        wanted = asdict(replace(config, picture_side=first.config.picture_side))
        found = asdict(first.config)
        if different := [
            f"{name}={found[name]} and not {wanted[name]}" for name in wanted if wanted[name] != found[name]
        ]:
            raise UserError(f"the initial VQGAN has {', '.join(different)}: leave that option out")
        self.vqgan.load_state_dict(first.state_dict())
        if isinstance(self.codebook, NearestLearner):
            table = self.vqgan.quantize.table.clone()
            vectors_per_step = self.recipe.batch_size * config.image_side**2
            self.codebook.place(torch.arange(len(table), device=table.device), table, vectors_per_step)

    def step(self, step: int, pixels: Tensor) -> dict[str, float]:
        """Learn from pictures [B, 3, S, S] uint8 -> losses, and gradient norms before clipping.

        `step` counts from 1. If one of the numbers is not finite, nothing changes.
        """
        recipe = self.recipe
        restore = snapshot(self)
        generator = step_generator(recipe.seed, step)
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

        quantized, codebook_loss = self.quantized(original, done, generator)
        with self.autocast():
            reconstruction = self.vqgan.pixels(quantized).float()

        # Both losses reach the networks as one gradient on the pixels, where their norms are balanced.
        detached = reconstruction.detach().requires_grad_()
        absolute, squared = F.l1_loss(detached, original), F.mse_loss(detached, original)
        loss = absolute + recipe.squared_weight * squared
        (pixel_gradient,) = torch.autograd.grad(loss, detached)
        losses = {"loss": loss + codebook_loss, "absolute": absolute, "squared": squared, "codebook": codebook_loss}
        self.optimizer.zero_grad()
        if done >= recipe.discriminator_start:
            with self.autocast():
                (adversarial,) = torch.autograd.grad(-self.discriminator(detached).float().mean(), detached)
                real, fake = self.discriminator(original).float(), self.discriminator(detached.detach()).float()
            hinge = (F.relu(1 - real).mean() + F.relu(1 + fake).mean()) / 2
            hinge.backward()
            scale = recipe.discriminator_weight * pixel_gradient.norm() / (adversarial.norm() + 1e-12)
            pixel_gradient = pixel_gradient + scale * adversarial
            losses["discriminator"] = hinge
        if recipe.decoder_only:
            reconstruction.backward(pixel_gradient)
        else:
            torch.autograd.backward([reconstruction, codebook_loss], [pixel_gradient, None])
        losses["grad_norm"] = nn.utils.clip_grad_norm_(self.weights, recipe.clip_grad_norm)
        if "discriminator" in losses:
            gradients = [weight.grad for weight in self.discriminator.parameters() if weight.grad is not None]
            losses["discriminator_grad_norm"] = nn.utils.get_total_norm(gradients)
        numbers = {name: value.item() for name, value in losses.items()}
        if all(math.isfinite(number) for number in numbers.values()):
            self.optimizer.step()
        else:
            restore()
        return numbers

    def quantized(self, original: Tensor, progress: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pixels [B, 3, S, S] in -1..1 -> (code vectors [B, C, h, w], codebook loss)."""
        with torch.set_grad_enabled(not self.recipe.decoder_only), self.autocast():
            z = self.vqgan.latents(original).float()
        if self.recipe.decoder_only:
            codes = self.vqgan.quantize.scores(z).argmax(dim=1)  # [B, h, w]
            vectors = F.embedding(codes, self.vqgan.quantize.table).permute(0, 3, 1, 2)
            return vectors, vectors.new_zeros(())
        quantized: tuple[Tensor, Tensor] = self.codebook(z, progress, generator)
        return quantized

    def autocast(self) -> AbstractContextManager[object]:
        """Autocast for the networks; the codebook stays in float32."""
        return autocast(self.vqgan.quant_conv.weight.device.type, self.recipe.precision)


def busiest_crops(pixels: Tensor, side: int, step: int, generator: torch.Generator) -> Tensor:
    """Crop each picture [B, 3, S, S] -> [B, 3, side, side], with corners at multiples of `step` pixels.

    Of CROPS_TRIED random crops, the one with the largest variance is taken: plain backgrounds teach little.
    """
    places = (pixels.shape[-1] - side) // step + 1
    corners = step * torch.randint(places, (len(pixels), CROPS_TRIED, 2), generator=generator)
    chosen = []
    for picture, candidates in zip(pixels, corners.tolist(), strict=True):
        crops = torch.stack([picture[:, top : top + side, left : left + side] for top, left in candidates])
        chosen.append(crops[crops.float().flatten(1).var(dim=1).argmax()])
    return torch.stack(chosen)
