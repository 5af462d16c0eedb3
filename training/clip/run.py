"""Training of a small CLIP with its own vocabulary (Radford et al. 2021, arXiv 2103.00020); the model is open_clip's.

OUT gets clip/ (a CLIP folder), checkpoint/, tokenizer.json, metrics.jsonl, tensorboard/, the decoded pictures in
pictures.npy and heldout.npy and, with a VQGAN, its reconstructions in decoded.npy.
"""

import math
from collections.abc import Callable, Generator
from contextlib import nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dalle_lean.clip.architecture import build_clip, model_config
from dalle_lean.clip.scorer import ClipScorer, read_clip_config, right_caption_first
from dalle_lean.errors import UserError
from dalle_lean.images.files import to_uint8
from dalle_lean.images.vqgan import FORMAT as VQGAN_FORMAT
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import sha256_file
from dalle_lean.io.folder_config import read_folder_config
from dalle_lean.optim.parameter_groups import parameter_groups
from dalle_lean.precision import autocast
from dalle_lean.progress import OnProgress
from dalle_lean.tokenizer import Tokenizer
from training.clip.hard_negatives import HardNegatives, RankingQuestions, ranking_questions
from training.clip.recipe import ClipRecipe
from training.data.augmentation import jitter
from training.data.image_text import ImageTextPairs, hold_out, read_captioned
from training.data.picture_batches import distinct_batches
from training.data.pixels import Pixels, in_file, reconstructions
from training.run.checkpoint import load_checkpoint
from training.run.draws import step_generator
from training.run.folder import place_tokenizer
from training.run.loop import TrainingRun
from training.run.progress import MeasuredProgress
from training.run.rates import cosine_rate
from training.step.guarded_step import guarded_step

PIXEL_MEAN = PIXEL_STD = (0.5, 0.5, 0.5)
# Section 2.5 of the paper scales similarities by at most 100.
LARGEST_LOGIT_SCALE = math.log(100)
CAPTION_CHOICES = 50
THING_CHOICES = 20
AMONG = {
    f"{view}{measurement}": count
    for view in ("", "decoded_")
    for measurement, count in (("right_caption_first", CAPTION_CHOICES), ("right_thing_first", THING_CHOICES))
}


class ClipRun(TrainingRun[list[int], MeasuredProgress]):
    """A run on captioned pictures. Random draws of step i follow from the seed and i alone.

    Args:
        heldout: a folder to measure on; by default a share of the captions, which is not trained on.
        tokenizer: a tokenizer.json; by default one trained on the captions.
        vqgan: a VQGAN folder. A share of the pictures is encoded and decoded, so that the CLIP also knows drawn
            pictures, which are slightly blurred.
        init: a CLIP folder of the recipe's shape, with the initial weights and the tokenizer.
        average: store the mean of the initial and the trained weights (Wortsman et al. 2022, arXiv 2203.05482), which
            keeps more of what the CLIP could before; needs `init`.
        save_dtype: type of the weights in OUT/clip.
    """

    def __init__(
        self,
        data: Path,
        out: Path,
        recipe: ClipRecipe,
        *,
        heldout: Path | None = None,
        tokenizer: Path | None = None,
        vqgan: Path | None = None,
        init: Path | None = None,
        average: bool = False,
        save_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        on_progress: OnProgress | None = None,
    ):
        if init is not None and tokenizer is not None:
            raise UserError(f"the CLIP in {init} has a tokenizer of its own; leave --tokenizer out")
        if average and init is None:
            raise UserError("--average needs --init, the CLIP folder whose weights to average with")
        if vqgan is not None:
            read_folder_config(vqgan, VQGAN_FORMAT)
        if init is not None:
            read_clip_config(init)
        self.out, self.result, self.save_dtype = out, out / "clip" / "config.json", save_dtype
        self.settings = self.recipe = recipe
        self.data, self.heldout = read_sets(data, heldout, recipe, out, on_progress)
        self.identity = {
            "recipe": recipe.identity(),
            "training pictures": self.data.digest(),
            "tokenizer": sha256_file(tokenizer) if tokenizer else None,
            "vqgan": sha256_file(vqgan / "config.json") if vqgan else None,
            **({"init": sha256_file(init / "config.json")} if init else {}),
            **({"average": True} if average else {}),
        }
        self.views = {"": self.heldout.pixels[:]}
        """Of the held-out pictures, uint8 [N, 3, S, S], by the prefix of their measurements."""
        if vqgan is not None:
            codec = VQGAN.load(vqgan).to(device)
            self.views["decoded_"] = torch.empty_like(self.views[""])
            decode(codec, self.heldout.pixels, self.views["decoded_"])
            self.data = self.partly_decoded(codec, on_progress)
        if init is None:
            words = place_tokenizer(out, tokenizer, self.data.captions, recipe.vocab_size)
            self.scorer = new_scorer(recipe, words, device)
        else:
            self.scorer = first_scorer(recipe, init, device)
        self.model = self.scorer.model
        self.initial = {name: weight.clone() for name, weight in self.model.state_dict().items()} if average else {}
        self.scorer.model.visual.to(memory_format=torch.channels_last)  # faster convolutions
        groups = parameter_groups(self.model, recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6)
        self.caption_ids = self.scorer.caption_ids(self.data.captions)
        self.hard_negatives = HardNegatives(self.data, recipe)
        self.ranking: RankingQuestions | None = None
        if recipe.alike:
            self.ranking = ranking_questions(self.heldout, self.data, recipe.alike[0], THING_CHOICES, recipe.seed)
        defaults = {"recipe": {"extra_captions": 0}}
        saved = load_checkpoint(out, model=self.model, optimizer=self.optimizer, run=self.identity, defaults=defaults)
        self.progress = MeasuredProgress(**{**(saved or {"unusable": dict(self.data.skipped)}), "among": AMONG})

    def partly_decoded(self, vqgan: VQGAN, on_progress: OnProgress | None) -> ImageTextPairs:
        """The training pictures, a random share of them replaced by VQGAN reconstructions, stored in decoded.npy."""
        data, seed = self.data, self.recipe.seed
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        rows = order[: round(self.recipe.decoded_share * len(data))]
        made_from = f"{self.identity['training pictures']} {self.identity['vqgan']} {seed} {len(rows)}"

        def fill(decoded: Tensor) -> None:
            decode(vqgan, data.pixels.take(rows), decoded, on_progress)

        store = self.out / "decoded.npy"
        decoded, _ = in_file(store, made_from, len(rows), self.recipe.picture_side, fill)
        return replace(data, pixels=data.pixels.replaced(rows, decoded))

    def batches(self, stopping: Callable[[], bool]) -> Generator[list[int], None, None]:
        anchors = distinct_batches(self.data.captions, self.hard_negatives.num_anchors, self.recipe.seed)
        for step, rows in islice(enumerate(anchors, start=1), self.progress.step, self.recipe.steps):
            yield self.hard_negatives.batch(step, rows)

    def step(self, step: int, batch: list[int]) -> dict[str, float]:
        recipe, scorer = self.recipe, self.scorer
        model: Any = scorer.model
        generator = step_generator(recipe.seed, step)
        pixels = jitter(self.data.pixels[batch].float() / 255, generator)
        asked = [*batch, *self.hard_negatives.extra_captions(step, batch, recipe.extra_captions)]

        def loss_of() -> Tensor:
            # Captions are short: with the fused CPU kernel's backward, the text tower takes twice as long.
            attention = sdpa_kernel(SDPBackend.MATH) if scorer.device.type == "cpu" else nullcontext()
            with autocast(scorer.device.type, recipe.precision), attention:
                images = model.encode_image(scorer.prepare(pixels).contiguous(memory_format=torch.channels_last))
                texts = model.encode_text(self.caption_ids[asked].to(scorer.device))
            images, texts = F.normalize(images.float(), dim=-1), F.normalize(texts.float(), dim=-1)
            return contrastive_loss(images, texts, model.logit_scale.exp())

        lr = cosine_rate(step, peak=recipe.lr, warmup_share=recipe.warmup_share, total_steps=recipe.steps)
        numbers = guarded_step(model, self.optimizer, loss_of, lr=lr, clip_grad_norm=recipe.clip_grad_norm)
        with torch.no_grad():
            model.logit_scale.clamp_(0, LARGEST_LOGIT_SCALE)
        return numbers

    def evaluate(self) -> None:
        """For each view of the held-out pictures, measure the share whose own caption ranks first among 50, and among
        those of the ranking questions."""
        if not self.due(self.settings.heldout_every):
            return
        captions, ranking, measured, scorer = self.heldout.captions, self.ranking, {}, self.stored()
        texts = scorer.text_features(captions).cpu()
        choices = None if ranking is None else scorer.text_features(ranking.captions).cpu()
        for view, pixels in self.views.items():
            pictures = scorer.image_features(pixels.float() / 255).cpu()
            measured[f"{view}right_caption_first"] = right_caption_first(pictures, texts, captions, of=CAPTION_CHOICES)
            if ranking is not None and choices is not None:
                measured[f"{view}right_thing_first"] = ranking.accuracy(pictures, choices)
        self.progress.measured = measured
        self.metrics.write(self.progress.step, **measured)

    def write_result(self) -> None:
        self.stored().save(self.out / "clip", self.save_dtype)

    def stored(self) -> ClipScorer:
        """The CLIP as OUT/clip has it."""
        if not self.initial:
            return self.scorer
        scorer = copy(self.scorer)
        scorer.model = deepcopy(self.model).eval()
        weights = scorer.model.state_dict()
        for name, initial in self.initial.items():
            if initial.is_floating_point():
                weights[name].lerp_(initial, 0.5)
        return scorer


def contrastive_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """The symmetric cross-entropy of the paper (figure 3), with extra captions as negatives.

    Args:
        images: unit vectors [B, E].
        texts: unit vectors [B + X, E]: the pictures' captions in the same order, then X captions without a picture.
        scale: factor of the cosine similarities, a scalar.
    """
    logits = scale * images @ texts.T
    own = torch.arange(len(images), device=images.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits[:, : len(images)].T, own)) / 2


def new_scorer(recipe: ClipRecipe, tokenizer: Tokenizer, device: str) -> ClipScorer:
    """A CLIP with new weights, the same for the same seed."""
    architecture = recipe.architecture(tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        weights = build_clip(model_config(architecture)).state_dict()
    return ClipScorer(
        architecture, weights, tokenizer=tokenizer, image_mean=PIXEL_MEAN, image_std=PIXEL_STD, device=device
    )


def first_scorer(recipe: ClipRecipe, folder: Path, device: str) -> ClipScorer:
    """Load a CLIP folder, to train it further; ValueError unless it has the recipe's shape."""
    scorer = ClipScorer.load(folder, device)
    if scorer.tokenizer is None:
        raise UserError(f"{folder} cannot be trained further: only a CLIP made by train-clip can")
    wanted = recipe.architecture(scorer.tokenizer)
    if scorer.architecture != wanted:
        raise UserError(f"{folder} has the shape {scorer.architecture} and not {wanted}: give its own sizes")
    return scorer


def read_sets(
    data: Path, heldout: Path | None, recipe: ClipRecipe, out: Path, on_progress: OnProgress | None
) -> tuple[ImageTextPairs, ImageTextPairs]:
    """The pictures to train on and those to measure on, stored in `out`."""
    side, fields = recipe.picture_side, recipe.fields
    train_set = read_captioned(data, side, on_progress, fields=fields, store=out / "pictures.npy")
    if heldout is None:
        train_set, heldout_set = hold_out(train_set, recipe.heldout_share, recipe.seed)
    else:
        heldout_set = read_captioned(heldout, side, fields=fields, store=out / "heldout.npy")
    return train_set, heldout_set.subsample(recipe.heldout_pictures)


def decode(vqgan: VQGAN, pixels: Pixels, decoded: Tensor, on_progress: OnProgress | None = None) -> None:
    """Encode and decode pictures, and write them into `decoded`, uint8 [N, 3, S, S]."""
    done = 0
    for _, _, part in reconstructions(vqgan, pixels, "bf16"):
        decoded[done : done + len(part)] = to_uint8(part).cpu()
        done += len(part)
        if on_progress is not None:
            on_progress(done, len(pixels), "pictures encoded and decoded")
