"""A small CLIP with a vocabulary of its own, and the steps in which it learns (arXiv 2103.00020).

Model and loss are open_clip's. Shapes: B pictures of a batch, S side in pixels.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dalle_lean.clip.architecture import build_clip, model_config
from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.errors import UserError
from dalle_lean.optim.lamb import parameter_groups
from dalle_lean.require import require
from dalle_lean.tokenizer import Tokenizer
from training.data.image_text import ImageTextPairs, distinct_batches, jitter
from training.run.schedule import cosine_rate
from training.step.precision import autocast
from training.tokenizers.hard_negatives import HardNegatives
from training.tokenizers.loop import guarded_step

PIXEL_MEAN = PIXEL_STD = (0.5, 0.5, 0.5)
HEAD_SIZE = 32
PATCH_SIZE = 4
# Similarities are scaled by at most 100 (section 2.5 of the paper).
LARGEST_LOGIT_SCALE = math.log(100)


@dataclass(frozen=True, kw_only=True)
class ClipRecipe:
    """How a CLIP is built and trained."""

    picture_side: int = 128
    """Pixels; a multiple of 32."""
    image_width: int = 48
    """Channels of the image tower at its first resolution, a quarter of the side; each of the next three halves the
    side and has twice as many."""
    image_layers: tuple[int, int, int, int] = (1, 1, 1, 1)
    """Blocks at each of the four resolutions."""
    width: int = 192
    """Of the text tower and of the features; a multiple of 32."""
    text_layers: int = 2
    context_length: int = 24
    """Token ids of a caption, the closing padding id included."""
    vocab_size: int = 2048
    """Of the tokenizer made from the captions, at most."""
    steps: int = 2500
    batch_size: int = 128
    """Pictures; no caption twice."""
    alike: tuple[tuple[str, ...], ...] = (("kind", "ground", "paint", "size", "place"), ("things",))
    """Fields of the listing by which pictures are alike: a group of hard negatives agrees in the fields of one of these
    tuples and differs in the others."""
    hard_negative_share: float = 0.5
    """Of a batch, that is to be such groups; 0: none. Without effect where the listing lacks the fields."""
    hard_group_size: int = 8
    """Pictures; half a batch where that is less."""
    lr: float = 1e-3
    """At its peak, after the warm-up; from there half a cosine down to 0."""
    warmup_share: float = 0.05
    """Of the steps."""
    weight_decay: float = 0.1
    """Not for biases, norms and the temperature."""
    clip_grad_norm: float = 1.0
    max_skipped_in_row: int = 20
    """So many non-finite steps in a row end the run."""
    precision: str = "bf16"
    """"bf16" (autocast) or "fp32"."""
    decoded_share: float = 0.5
    """Of the training pictures that are shown as a VQGAN decodes them, when one is given."""
    heldout_share: float = 0.05
    """Of the captions, when no held-out folder is given."""
    heldout_pictures: int = 512
    """At most so many are measured."""
    seed: int = 0
    log_every: int = 20
    """Steps."""
    heldout_every: int = 200
    """Steps."""
    checkpoint_every: int = 50
    """Steps."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least = {"seed": 0, "context_length": 2, "batch_size": 2, "hard_group_size": 2}.get(name, 1)
            if name.endswith("_share"):
                if not 0 <= value < 1:
                    raise UserError(f"{name}={value}: must be at least 0 and below 1")
            elif isinstance(value, int) and value < least:
                raise UserError(f"{name}={value}: must be at least {least}")
        if self.heldout_share == 0:
            raise UserError("heldout_share=0: must be above 0, or there would be no caption to measure on")
        if self.precision not in ("bf16", "fp32"):
            raise UserError(f"precision={self.precision!r}: must be bf16 or fp32")
        if not 0 < self.lr < 1:
            raise UserError(f"lr={self.lr}: must be between 0 and 1")
        if len(self.image_layers) != 4 or min(self.image_layers) < 1:
            raise UserError(f"image_layers={self.image_layers}: must be four positive numbers")
        for name in ("width", "picture_side"):
            if getattr(self, name) % 32:
                raise UserError(f"{name}={getattr(self, name)}: must be a multiple of 32")
        if not all(self.alike):
            raise UserError(f"alike={self.alike}: a list of fields must name one at least")

    @property
    def fields(self) -> tuple[str, ...]:
        """Of the listing, that are read."""
        return tuple(dict.fromkeys(name for fields in self.alike for name in fields))

    def architecture(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """A model config with this package's residual network for pictures; captions end at the first padding id, where
        the causal text tower is read."""
        return {
            "embed_dim": self.width,
            "vision_cfg": {
                "image_size": self.picture_side,
                "patch_size": PATCH_SIZE,
                "widths": [self.image_width << level for level in range(len(self.image_layers))],
                "blocks": list(self.image_layers),
            },
            "text_cfg": {
                "context_length": self.context_length,
                "vocab_size": tokenizer.vocab_size,
                "width": self.width,
                "heads": self.width // HEAD_SIZE,
                "layers": self.text_layers,
                "pool_type": "eos",
                "eos_id": tokenizer.padding_id,
            },
        }

    def learning_rate(self, step: int) -> float:
        """At a step, the first being 1: linear up to `lr`, then half a cosine that reaches 0 after the last."""
        return cosine_rate(step, peak=self.lr, warmup_share=self.warmup_share, total_steps=self.steps)


class Learner:
    """The steps of a run. What step i does depends on recipe, data, weights and i alone, not on the process."""

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

    def batches(self, steps_done: int) -> Iterator[tuple[int, list[int]]]:
        """(step, rows) of the steps that are left; the first step of a run is 1."""
        begun = distinct_batches(self.data.captions, self.hard_negatives.seeds, self.recipe.seed)
        for step, rows in itertools.islice(enumerate(begun, start=1), steps_done, self.recipe.steps):
            yield step, self.hard_negatives.batch(step, rows)

    def step(self, step: int, rows: list[int]) -> dict[str, float]:
        """Learn from these rows, as `guarded_step` tells."""
        model = self.scorer.model

        def loss_of() -> Tensor:
            with self.arithmetic():
                pixels = self.scorer.prepare(self.pictures(step, rows))
                images = model.encode_image(pixels.contiguous(memory_format=torch.channels_last))
                texts = model.encode_text(self.caption_ids[rows].to(self.scorer.device))
            images, texts = F.normalize(images.float(), dim=-1), F.normalize(texts.float(), dim=-1)
            loss: Tensor = self.clip_loss(images, texts, model.logit_scale.exp())
            return loss

        lr = self.recipe.learning_rate(step)
        numbers = guarded_step(model, self.optimizer, loss_of, lr=lr, clip_grad_norm=self.recipe.clip_grad_norm)
        with torch.no_grad():
            model.logit_scale.clamp_(0, LARGEST_LOGIT_SCALE)
        return numbers

    def pictures(self, step: int, rows: list[int]) -> Tensor:
        """The pictures of a step, [B, 3, S, S] in 0..1, each a little moved and scaled."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        return jitter(self.data.pixels[rows].float() / 255, generator)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
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
