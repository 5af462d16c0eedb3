"""The run that trains a small CLIP: what it reads, what it measures on its way, and how it survives a kill.

OUT gets clip/ (a CLIP folder), checkpoint/, tokenizer.json, metrics.jsonl and tensorboard/. The pictures, as they were
read, are in pictures.npy and heldout.npy; with a VQGAN a share of them, as it decodes them, is in decoded.npy.
"""

import dataclasses
import math
from pathlib import Path

import torch
from torch import Tensor

from dalle_lean.clip.scorer import ClipScorer, right_caption_first
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import sha256_file
from dalle_lean.progress import OnProgress
from training.data.image_text import ImageTextPairs, digest, hold_out, read_captioned
from training.data.pixels import Pixels, in_file
from training.data.remote_io import silent
from training.run.checkpoint import load_checkpoint
from training.run.folder import place_tokenizer
from training.run.graceful_stop import TimeLimit
from training.run.metrics import MetricsLog
from training.run.progress import MeasuredProgress, OnNotice
from training.tokenizers.clip_learner import ClipRecipe, Learner, new_scorer
from training.tokenizers.clip_quiz import Quiz, rivals_quiz
from training.tokenizers.loop import take_steps, what_decides

CAPTIONS_COMPETE = 50
RIVALS_COMPETE = 20
AMONG = {
    f"{seen}{measure}": count
    for seen in ("", "decoded_")
    for measure, count in (("right_caption_first", CAPTIONS_COMPETE), ("right_thing_first", RIVALS_COMPETE))
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
    on_notice: OnNotice | None = None,
) -> MeasuredProgress:
    """Train on the folder `data`, or continue the run that `out` holds exactly where its last checkpoint stood.

    Args:
        heldout: a folder to measure on; without it a share of the captions is left out of the training.
        tokenizer: a tokenizer.json; without it one is made from the captions.
        vqgan: a VQGAN folder; then a share of the pictures is shown as it decodes them, so that scores hold for
            drawn pictures, which are a little blurred.
        save_dtype: of the weights in OUT/clip.
        max_minutes: after which the run stops where it is, with its weights so far in place; the time to read counts.
            The same call goes on.
        on_progress: called with (done, total, note): pictures read, pictures decoded, then pictures trained on.
        on_notice: called upon Ctrl+C and SIGTERM.

    Raises:
        TrainingDiverged: see ClipRecipe.max_skipped_in_row; the last checkpoint stays as it was.
        ValueError: data, tokenizer or the run in `out` do not fit.
        KeyboardInterrupt, Terminated: on Ctrl+C or SIGTERM, once the step is finished and saved.
    """
    limit = TimeLimit(max_minutes)
    train_set, heldout_set = read_sets(data, heldout, recipe, out, on_progress, on_notice or silent)
    run = {
        "recipe": what_decides(recipe),
        "training pictures": digest(train_set),
        "tokenizer": sha256_file(tokenizer) if tokenizer else None,
        "vqgan": sha256_file(vqgan / "config.json") if vqgan else None,
    }
    views = {"": heldout_set.pixels[:]}
    if vqgan is not None:
        views["decoded_"] = torch.empty_like(views[""])
        decode(VQGAN.load(vqgan).to(device), heldout_set.pixels, views["decoded_"], device)
        train_set = partly_decoded(
            train_set, out / "decoded.npy", vqgan, recipe, device, on_progress, on_notice or silent
        )
    placed = place_tokenizer(out, tokenizer, train_set.captions, recipe.vocab_size)
    scorer = new_scorer(recipe, placed, device)
    learner = Learner(recipe, scorer, train_set)
    if on_notice is not None:
        for notice in learner.hard_negatives.notices:
            on_notice(notice)
    quiz = rivals_quiz(heldout_set, train_set, recipe.alike[0], RIVALS_COMPETE, recipe.seed) if recipe.alike else None
    saved = load_checkpoint(out, model=scorer.model, optimizer=learner.optimizer, run=run)
    progress = MeasuredProgress(**{**(saved or {"unusable": dict(train_set.skipped)}), "among": AMONG})

    def measure_heldout(metrics: MetricsLog) -> None:
        progress.measured = measure(scorer, views, heldout_set.captions, quiz)
        metrics.write(progress.step, **progress.measured)

    take_steps(
        out,
        recipe,
        learner.batches(progress.step),
        learner.step,
        measure=measure_heldout,
        finish=lambda metrics: scorer.save(out / "clip", save_dtype),
        progress=progress,
        model=scorer.model,
        optimizer=learner.optimizer,
        run=run,
        limit=limit,
        on_progress=on_progress,
        on_notice=on_notice,
    )
    return progress


def read_sets(
    data: Path,
    heldout: Path | None,
    recipe: ClipRecipe,
    out: Path,
    on_progress: OnProgress | None,
    on_notice: OnNotice,
) -> tuple[ImageTextPairs, ImageTextPairs]:
    """The pictures to train on, and those to measure on: of a folder, else of captions set aside; in files of `out`."""
    side = recipe.picture_side
    train_set = read_captioned(
        data, side, on_progress, fields=recipe.fields, store=out / "pictures.npy", on_notice=on_notice
    )
    if heldout is None:
        train_set, heldout_set = hold_out(train_set, recipe.heldout_share, recipe.seed)
    else:
        heldout_set = read_captioned(
            heldout, side, fields=recipe.fields, store=out / "heldout.npy", on_notice=on_notice
        )
    stride = math.ceil(len(heldout_set) / recipe.heldout_pictures)
    return train_set, heldout_set.take(range(0, len(heldout_set), stride))


def measure(scorer: ClipScorer, views: dict[str, Tensor], captions: list[str], quiz: Quiz | None) -> dict[str, float]:
    """For each view of the held-out pictures, uint8 [N, 3, S, S], the share whose own caption comes first: of 50, and
    of the quiz."""
    texts = scorer.text_features(captions).cpu()
    choices = None if quiz is None else scorer.text_features(quiz.captions).cpu()
    measured = {}
    for view, pixels in views.items():
        pictures = scorer.image_features(pixels.float() / 255).cpu()
        measured[f"{view}right_caption_first"] = right_caption_first(pictures, texts, captions, of=CAPTIONS_COMPETE)
        if quiz is not None and choices is not None:
            measured[f"{view}right_thing_first"] = quiz.first(pictures, choices)
    return measured


def partly_decoded(
    data: ImageTextPairs,
    store: Path,
    vqgan: Path,
    recipe: ClipRecipe,
    device: str,
    on_progress: OnProgress | None,
    on_notice: OnNotice = silent,
) -> ImageTextPairs:
    """`data` with a share of its pictures, drawn by the seed, as the VQGAN decodes them; kept in the file `store`."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(recipe.seed))
    rows = order[: round(recipe.decoded_share * len(data))]
    made_from = f"{digest(data)} {sha256_file(vqgan / 'config.json')} {recipe.seed} {len(rows)}"

    def fill(decoded: Tensor) -> None:
        decode(VQGAN.load(vqgan).to(device), data.pixels.take(rows), decoded, device, on_progress)

    decoded, _ = in_file(store, made_from, len(rows), recipe.picture_side, fill, on_notice)
    return dataclasses.replace(data, pixels=data.pixels.replaced(rows, decoded))


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
