"""Training of a small CLIP.

OUT gets clip/ (a CLIP folder), checkpoint/, tokenizer.json, metrics.jsonl and tensorboard/. The pictures, as they were
read, are in pictures.npy and heldout.npy; with a VQGAN a share of them, as it decodes them, is in decoded.npy.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dalle_lean.clip.scorer import ClipScorer, right_caption_first
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import sha256_file
from dalle_lean.progress import OnProgress
from training.clip.learner import ClipLearner, new_scorer
from training.clip.ranking_test import RankingTest, ranking_test
from training.clip.recipe import ClipRecipe
from training.data.image_text import ImageTextPairs, hold_out, read_captioned
from training.data.pixels import Pixels, in_file
from training.run.checkpoint import load_checkpoint
from training.run.folder import place_tokenizer
from training.run.graceful_stop import TimeLimit
from training.run.loop import TrainingRun
from training.run.progress import MeasuredProgress

CAPTION_CHOICES = 50
THING_CHOICES = 20
AMONG = {
    f"{view}{measurement}": count
    for view in ("", "decoded_")
    for measurement, count in (("right_caption_first", CAPTION_CHOICES), ("right_thing_first", THING_CHOICES))
}


def train_clip(
    data: Path,
    out: Path,
    recipe: ClipRecipe,
    *,
    heldout: Path | None = None,
    tokenizer: Path | None = None,
    vqgan: Path | None = None,
    save_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_minutes: float | None = None,
    on_progress: OnProgress | None = None,
) -> MeasuredProgress:
    """Train on the folder `data`, or continue the run that `out` holds exactly where its last checkpoint stood.

    Args:
        heldout: a folder to measure on; without it a share of the captions is left out of the training.
        tokenizer: a tokenizer.json; without it one is made from the captions.
        vqgan: a VQGAN folder; then a share of the pictures is shown as it decodes them, so that scores hold for
            drawn pictures, which are a little blurred.
        save_dtype: of the weights in OUT/clip.
        max_minutes, on_progress, and what is raised: as `training.vqgan.run.train_vqgan`'s.
    """
    limit = TimeLimit(max_minutes)
    train_set, heldout_set = read_sets(data, heldout, recipe, out, on_progress)
    identity = {
        "recipe": recipe.identity(),
        "training pictures": train_set.digest(),
        "tokenizer": sha256_file(tokenizer) if tokenizer else None,
        "vqgan": sha256_file(vqgan / "config.json") if vqgan else None,
    }
    views = {"": heldout_set.pixels[:]}
    if vqgan is not None:
        views["decoded_"] = torch.empty_like(views[""])
        decode(VQGAN.load(vqgan).to(device), heldout_set.pixels, views["decoded_"], device)
        train_set = partly_decoded(train_set, out / "decoded.npy", vqgan, recipe, device, on_progress)
    scorer = new_scorer(recipe, place_tokenizer(out, tokenizer, train_set.captions, recipe.vocab_size), device)
    learner = ClipLearner(recipe, scorer, train_set)
    run = ClipRun(out, learner, heldout_set, views, identity, save_dtype)
    return run.go(on_progress, limit)


class ClipRun(TrainingRun[list[int], MeasuredProgress]):
    """A run in the state its folder holds; see `train_clip`.

    Args:
        views: of the held-out pictures, uint8 [N, 3, S, S], by the prefix of what is measured on them.
    """

    unit = "pictures"

    def __init__(
        self,
        out: Path,
        learner: ClipLearner,
        heldout: ImageTextPairs,
        views: dict[str, Tensor],
        identity: dict[str, Any],
        save_dtype: torch.dtype,
    ):
        recipe, train_set = learner.recipe, learner.data
        self.out, self.result, self.save_dtype = out, out / "clip" / "config.json", save_dtype
        self.learner, self.heldout, self.views, self.identity = learner, heldout, views, identity
        self.model, self.optimizer, self.settings = learner.scorer.model, learner.optimizer, recipe
        self.ranking: RankingTest | None = None
        if recipe.alike:
            self.ranking = ranking_test(heldout, train_set, recipe.alike[0], THING_CHOICES, recipe.seed)
        saved = load_checkpoint(out, model=self.model, optimizer=self.optimizer, run=identity)
        self.progress = MeasuredProgress(**{**(saved or {"unusable": dict(train_set.skipped)}), "among": AMONG})

    def batches(self, stopping: Callable[[], bool]) -> Generator[list[int], None, None]:
        return self.learner.batches(self.progress.step)

    def step(self, step: int, batch: list[int]) -> dict[str, float]:
        return self.learner.step(step, batch)

    def evaluate(self) -> None:
        if self.due(self.settings.heldout_every):
            scorer, captions = self.learner.scorer, self.heldout.captions
            self.progress.measured = measure(scorer, self.views, captions, self.ranking)
            self.metrics.write(self.progress.step, **self.progress.measured)

    def write_result(self) -> None:
        self.learner.scorer.save(self.out / "clip", self.save_dtype)


def read_sets(
    data: Path,
    heldout: Path | None,
    recipe: ClipRecipe,
    out: Path,
    on_progress: OnProgress | None,
) -> tuple[ImageTextPairs, ImageTextPairs]:
    """The pictures to train on, and those to measure on: of a folder, else of captions set aside; in files of `out`."""
    side, fields = recipe.picture_side, recipe.fields
    train_set = read_captioned(data, side, on_progress, fields=fields, store=out / "pictures.npy")
    if heldout is None:
        train_set, heldout_set = hold_out(train_set, recipe.heldout_share, recipe.seed)
    else:
        heldout_set = read_captioned(heldout, side, fields=fields, store=out / "heldout.npy")
    return train_set, heldout_set.spread(recipe.heldout_pictures)


def measure(
    scorer: ClipScorer, views: dict[str, Tensor], captions: list[str], ranking: RankingTest | None
) -> dict[str, float]:
    """For each view of the held-out pictures, uint8 [N, 3, S, S], the share whose own caption comes first: of 50, and
    of the ranking test's."""
    texts = scorer.text_features(captions).cpu()
    choices = None if ranking is None else scorer.text_features(ranking.captions).cpu()
    measured = {}
    for view, pixels in views.items():
        pictures = scorer.image_features(pixels.float() / 255).cpu()
        measured[f"{view}right_caption_first"] = right_caption_first(pictures, texts, captions, of=CAPTION_CHOICES)
        if ranking is not None and choices is not None:
            measured[f"{view}right_thing_first"] = ranking.accuracy(pictures, choices)
    return measured


def partly_decoded(
    data: ImageTextPairs,
    store: Path,
    vqgan: Path,
    recipe: ClipRecipe,
    device: str,
    on_progress: OnProgress | None,
) -> ImageTextPairs:
    """`data` with a share of its pictures, drawn by the seed, as the VQGAN decodes them; kept in the file `store`."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(recipe.seed))
    rows = order[: round(recipe.decoded_share * len(data))]
    made_from = f"{data.digest()} {sha256_file(vqgan / 'config.json')} {recipe.seed} {len(rows)}"

    def fill(decoded: Tensor) -> None:
        decode(VQGAN.load(vqgan).to(device), data.pixels.take(rows), decoded, device, on_progress)

    decoded, _ = in_file(store, made_from, len(rows), recipe.picture_side, fill)
    return replace(data, pixels=data.pixels.replaced(rows, decoded))


@torch.no_grad()
def decode(
    vqgan: VQGAN,
    pixels: Pixels,
    decoded: Tensor,
    device: str,
    on_progress: OnProgress | None = None,
    batch_size: int = 64,
) -> None:
    """Write pictures after encoding and decoding into `decoded`, uint8 [N, 3, S, S]."""
    for start in range(0, len(pixels), batch_size):
        part = slice(start, start + batch_size)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            images = vqgan.decode(vqgan.encode(pixels[part].to(device).float() / 255))
        decoded[part] = (images.float() * 255).round().to("cpu", torch.uint8)
        if on_progress is not None:
            on_progress(min(part.stop, len(pixels)), len(pixels), "pictures through the VQGAN")
