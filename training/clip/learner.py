"""A small CLIP with its own vocabulary, and its training step (arXiv 2103.00020).

Model and loss are open_clip's. Shapes: B pictures of a batch, S side in pixels.
"""

import itertools
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dalle_lean.clip.architecture import build_clip, model_config
from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.optim.lamb import parameter_groups
from dalle_lean.require import require
from dalle_lean.tokenizer import Tokenizer
from training.clip.hard_negatives import HardNegatives
from training.clip.recipe import ClipRecipe
from training.data.image_text import ImageTextPairs
from training.data.picture_batches import distinct_batches
from training.run.schedule import cosine_rate
from training.step.guarded_step import guarded_step
from training.step.precision import autocast

PIXEL_MEAN = PIXEL_STD = (0.5, 0.5, 0.5)
# Similarities are scaled by at most 100 (section 2.5 of the paper).
LARGEST_LOGIT_SCALE = math.log(100)


class ClipLearner:
    """The steps of a run. Step i depends on the recipe, the data, the weights and i alone, not on the process."""

    def __init__(self, recipe: ClipRecipe, scorer: ClipScorer, data: ImageTextPairs):
        self.recipe, self.scorer, self.data = recipe, scorer, data
        scorer.model.visual.to(memory_format=torch.channels_last)  # for the convolutions' speed
        self.optimizer = new_optimizer(scorer.model, recipe.weight_decay)
        self.caption_ids = scorer.caption_ids(data.captions)
        self.hard_negatives = HardNegatives(
            data,
            recipe.alike,
            batch_size=recipe.batch_size,
            share=recipe.hard_negative_share,
            group_size=recipe.hard_group_size,
            seed=recipe.seed,
        )
        self.clip_loss = require("open_clip", extra="training").ClipLoss()

    def batches(self, steps_done: int) -> Generator[list[int], None, None]:
        """The rows of the steps that are left."""
        started = distinct_batches(self.data.captions, self.hard_negatives.seeds, self.recipe.seed)
        for step, rows in itertools.islice(enumerate(started, start=1), steps_done, self.recipe.steps):
            yield self.hard_negatives.batch(step, rows)

    def step(self, step: int, rows: list[int]) -> dict[str, float]:
        """Learn from these rows; see `guarded_step`."""
        model = self.scorer.model

        def loss_of() -> Tensor:
            with self.autocast():
                pixels = self.scorer.prepare(self.pictures(step, rows))
                images = model.encode_image(pixels.contiguous(memory_format=torch.channels_last))
                texts = model.encode_text(self.caption_ids[rows].to(self.scorer.device))
            images, texts = F.normalize(images.float(), dim=-1), F.normalize(texts.float(), dim=-1)
            loss: Tensor = self.clip_loss(images, texts, model.logit_scale.exp())
            return loss

        recipe = self.recipe
        lr = cosine_rate(step, peak=recipe.lr, warmup_share=recipe.warmup_share, total_steps=recipe.steps)
        numbers = guarded_step(model, self.optimizer, loss_of, lr=lr, clip_grad_norm=recipe.clip_grad_norm)
        with torch.no_grad():
            model.logit_scale.clamp_(0, LARGEST_LOGIT_SCALE)
        return numbers

    def pictures(self, step: int, rows: list[int]) -> Tensor:
        """The pictures of a step, [B, 3, S, S] in 0..1, each shifted and scaled a little."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        return jitter(self.data.pixels[rows].float() / 255, generator)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision of the two towers; on a CPU with explicit attention weights."""
        # Captions are short: the fused CPU kernel's backward makes the text tower take twice as long.
        on_cpu = self.scorer.device.type == "cpu"
        with (
            autocast(self.scorer.device.type, self.recipe.precision),
            sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext(),
        ):
            yield


def new_scorer(recipe: ClipRecipe, tokenizer: Tokenizer, device: str) -> ClipScorer:
    """A CLIP with new weights, the same for the same seed."""
    architecture = recipe.architecture(tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        weights = build_clip(model_config(architecture)).state_dict()
    return ClipScorer(
        architecture, weights, tokenizer=tokenizer, image_mean=PIXEL_MEAN, image_std=PIXEL_STD, device=device
    )


def new_optimizer(model: torch.nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that lets only matrices decay."""
    return torch.optim.AdamW(parameter_groups(model, weight_decay), betas=(0.9, 0.98), eps=1e-6)


def jitter(pixels: Tensor, generator: torch.Generator, shift: float = 0.06, scale: float = 0.1) -> Tensor:
    """Move each picture [B, 3, S, S] by up to `shift` of its side and scale it by up to 1 +- `scale`; edges repeat.

    No mirroring and no change of colour: captions speak of left, right and colours.
    """
    draws = torch.rand(len(pixels), 3, generator=generator) * 2 - 1
    theta = torch.zeros(len(pixels), 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = 1 + scale * draws[:, 0]
    theta[:, :, 2] = 2 * shift * draws[:, 1:]  # in grid units the side is 2
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid.to(pixels.device), padding_mode="border", align_corners=False)
