"""Training of a VQGAN on a folder of pictures (Esser et al. 2021, arXiv 2012.09841), without downloaded weights.

OUT becomes a VQGAN folder; beside it stand checkpoint/, metrics.jsonl, tensorboard/, reconstructions/, and pictures.npy
and heldout.npy, the pictures as they were read.
"""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.codebook_usage import codebook_use
from dalle_lean.images.files import PICTURE_SUFFIXES
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.progress import OnProgress
from training.data.image_text import Unusable, read_picture
from training.data.pixels import Pixels, in_file, in_memory, stamp
from training.data.remote_io import silent
from training.run.checkpoint import load_checkpoint
from training.run.graceful_stop import TimeLimit
from training.run.metrics import MetricsLog
from training.run.previews import save_sheet
from training.run.progress import OnNotice, StepCount
from training.step.precision import autocast
from training.tokenizers.loop import shuffled_batches, take_steps, what_decides
from training.tokenizers.vqgan_learner import VQGANLearner, VQGANRecipe


@dataclass
class Progress(StepCount):
    """The numbers of this run that move."""

    psnr_db: float = math.nan
    """On the held-out pictures, the last time it was measured."""
    codes_used: float = math.nan
    """Share of the codebook, on the same pictures."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Files that could not be read as pictures, by reason."""

    def findings(self) -> list[str]:
        words = []
        if math.isfinite(self.psnr_db):
            words.append(f"PSNR {self.psnr_db:.2f} dB, {self.codes_used:.0%} of the codes used")
        return words + [f"passed over {count} ({reason})" for reason, count in self.unusable.items()]


@dataclass(frozen=True, eq=False)
class Pictures:
    """Decoded pictures."""

    pixels: Pixels
    skipped: Counter[str] = field(default_factory=Counter)
    """Files that could not be read, by reason."""


def train_vqgan(
    data: Path,
    out: Path,
    recipe: VQGANRecipe,
    *,
    heldout: Path | None = None,
    init_from: VQGAN | None = None,
    save_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    max_minutes: float | None = None,
    on_progress: OnProgress | None = None,
    on_notice: OnNotice | None = None,
) -> Progress:
    """Train on all pictures below `data`, or continue the run that `out` holds exactly where its checkpoint stood.

    Args:
        heldout: a folder to measure on; without it every 50th picture is left out of the training.
        init_from: weights to begin with, of a VQGAN that differs in nothing but the side of its pictures.
        save_dtype: to which the final weights are rounded; what they measure afterwards is the last line of metrics.
        max_minutes: after which the run stops where it is, with its weights so far in place; the time to read counts.
            The same call goes on.
        on_progress: called with (done, total, note): pictures read first, then pictures trained on.
        on_notice: called upon Ctrl+C and SIGTERM.

    Raises:
        TrainingDiverged: see VQGANRecipe.max_skipped_in_row; the last checkpoint stays as it was.
        ValueError: the data or the run in `out` do not fit.
        KeyboardInterrupt, Terminated: on Ctrl+C or SIGTERM, once the step is finished and saved.
    """
    limit = TimeLimit(max_minutes)
    train_set, heldout_set = read_sets(data, heldout, recipe, out, on_progress, on_notice or silent)
    learner = VQGANLearner(recipe).to(device)
    identity = {
        "recipe": what_decides(recipe),
        "pictures": digest(train_set.pixels),
    }
    if init_from is not None:
        learner.begin_with(init_from)
        identity["init_from"] = init_from.fingerprint()
    saved = load_checkpoint(out, model=learner, optimizer=learner.optimizer, run=identity)
    progress = Progress(**saved) if saved else Progress()
    progress.unusable = dict(train_set.skipped + heldout_set.skipped)

    def measure_heldout(metrics: MetricsLog, vqgan: VQGAN, name: str) -> None:
        measured, shown = measure(vqgan, heldout_set.pixels[:], recipe)
        progress.psnr_db, progress.codes_used = measured["heldout_psnr_db"], measured["heldout_codes_used"]
        metrics.write(progress.step, **measured)
        save_sheet(out / "reconstructions" / f"{name}.png", shown)

    def finish(metrics: MetricsLog) -> None:
        learner.vqgan.save(out, save_dtype)
        measure_heldout(metrics, VQGAN.load(out).to(device), "final")

    take_steps(
        out,
        recipe,
        shuffled_batches(len(train_set.pixels), recipe, recipe.seed, progress.step),
        lambda step, rows: learner.step(step, train_set.pixels[rows]),
        measure=lambda metrics: measure_heldout(metrics, learner.vqgan, f"step-{progress.step:06d}"),
        finish=finish,
        progress=progress,
        model=learner,
        optimizer=learner.optimizer,
        run=identity,
        limit=limit,
        on_progress=on_progress,
        on_notice=on_notice,
    )
    return progress


@torch.no_grad()
def measure(
    vqgan: VQGAN, pixels: Tensor, recipe: VQGANRecipe, batch_size: int = 64
) -> tuple[dict[str, float], list[Tensor]]:
    """PSNR (dB, of the mean squared error over all pictures, pixels in 0..1) and codebook use; and rows to look at."""
    device = vqgan.quant_conv.weight.device
    codes, squared_error = [], 0.0
    shown: list[Tensor] = []
    for chunk in pixels.split(batch_size):
        original = chunk.to(device).float() / 255
        with autocast(device.type, recipe.precision):
            codes.append(vqgan.encode(original))
            reconstruction = vqgan.decode(codes[-1]).float()
        squared_error += float((reconstruction - original).double().square().sum())
        if not shown:
            shown = side_by_side(original, reconstruction)
    use = codebook_use(torch.cat(codes), vqgan.config.codebook_size)
    psnr_db = -10 * math.log10(max(squared_error / pixels.numel(), 1e-10))
    return {
        "heldout_psnr_db": psnr_db,
        "heldout_codes_used": use.share,
        "heldout_codes_perplexity": use.perplexity,
    }, shown


def side_by_side(originals: Tensor, reconstructions: Tensor, width: int = 16) -> list[Tensor]:
    """Rows of `width` pictures: originals, their reconstructions below, and so on; a last short row is left out."""
    if len(originals) < width:
        return [originals, reconstructions]
    whole = len(originals) - len(originals) % width
    pairs = zip(originals[:whole].split(width), reconstructions[:whole].split(width), strict=True)
    return [row for pair in pairs for row in pair]


def digest(pixels: Pixels) -> str:
    """SHA-256 over all pictures."""
    running = hashlib.sha256()
    for chunk in pixels.chunks():
        running.update(chunk.numpy().data)
    return running.hexdigest()


def read_sets(
    data: Path,
    heldout: Path | None,
    recipe: VQGANRecipe,
    out: Path,
    on_progress: OnProgress | None,
    on_notice: OnNotice,
) -> tuple[Pictures, Pictures]:
    """The pictures to train on, and those to measure on; in files of `out`."""
    side = recipe.crop_from or recipe.config.picture_side
    train_set = read_pictures(data, side, on_progress, store=out / "pictures.npy", on_notice=on_notice)
    if heldout is not None:
        heldout_set = read_pictures(heldout, side, on_progress, store=out / "heldout.npy", on_notice=on_notice)
    else:
        held = torch.arange(len(train_set.pixels)) % 50 == 0
        heldout_set = Pictures(train_set.pixels.take(held))
        train_set = Pictures(train_set.pixels.take(~held), train_set.skipped)
    stride = math.ceil(len(heldout_set.pixels) / recipe.heldout_pictures)
    return train_set, Pictures(heldout_set.pixels.take(slice(None, None, stride)), heldout_set.skipped)


def read_pictures(
    folder: Path,
    side: int,
    on_progress: OnProgress | None = None,
    *,
    store: Path | None = None,
    on_notice: OnNotice = silent,
) -> Pictures:
    """All pictures below a folder in the order of their names, side x side; ValueError when none can be read.

    store, on_notice: as of `training.data.image_text.read_captioned`.
    """
    names = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix.lower() in PICTURE_SUFFIXES
    )

    def fill(pixels: Tensor) -> dict[str, Any]:
        skipped: Counter[str] = Counter()
        count = 0
        for done, name in enumerate(names, start=1):
            try:
                pixels[count] = read_picture(folder, name, side)
                count += 1
            except Unusable as reason:
                skipped[str(reason)] += 1
            if on_progress is not None and (done % 500 == 0 or done == len(names)):
                on_progress(done, len(names), f"{skipped.total()} unusable" if skipped else "")
        return {"count": count, "skipped": skipped}

    if store is None:
        pixels, said = in_memory(len(names), side, fill)
    else:
        pixels, said = in_file(store, stamp(folder, names, side), len(names), side, fill, on_notice)
    if not said["count"]:
        raise UserError(f"{folder}: no picture can be read: {dict(said['skipped']) or 'there are none'}")
    return Pictures(Pixels(pixels[: said["count"]]), Counter(said["skipped"]))
