"""Training of a VQGAN on a folder of pictures (Esser et al. 2021, arXiv 2012.09841), without downloaded weights.

OUT becomes a VQGAN folder, and also gets checkpoint/, metrics.jsonl, tensorboard/, reconstructions/, and the decoded
pictures in pictures.npy and heldout.npy.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN, codebook_use
from dalle_lean.progress import OnProgress
from training.data.image_text import ImageTextPairs, read_pictures
from training.data.picture_batches import shuffled_batches
from training.data.pixels import reconstructions
from training.run.checkpoint import load_checkpoint
from training.run.loop import TrainingRun
from training.run.previews import save_sheet
from training.run.progress import StepCount, skipped_by_reason
from training.vqgan.learner import VQGANLearner
from training.vqgan.recipe import VQGANRecipe

HELD_OUT_ONE_IN = 50


@dataclass
class Progress(StepCount):
    psnr_db: float = math.nan
    """Of the held-out pictures, as last measured."""
    codes_used: float = math.nan
    """Share of the codebook in 0..1, for the same pictures."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Files that are not readable as pictures, by reason."""

    def details(self) -> list[str]:
        words = []
        if math.isfinite(self.psnr_db):
            words.append(f"PSNR {self.psnr_db:.2f} dB, {self.codes_used:.0%} of the codes used")
        return words + skipped_by_reason(self.unusable)


class VQGANRun(TrainingRun[Tensor, Progress]):
    """A run on all pictures below `data`.

    Args:
        heldout: a folder to measure on; by default every 50th picture, which is not trained on.
        init_from: a VQGAN with the initial weights, whose config may differ in picture_side only.
        save_dtype: type of the final weights; the last line of the metrics measures them after rounding.
    """

    def __init__(
        self,
        data: Path,
        out: Path,
        recipe: VQGANRecipe,
        *,
        heldout: Path | None = None,
        init_from: VQGAN | None = None,
        save_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        on_progress: OnProgress | None = None,
    ):
        encoder = init_from if recipe.decoder_only else None
        if encoder is not None and encoder.codes_fingerprint(save_dtype) != encoder.codes_fingerprint():
            raise UserError(
                f"save_dtype={save_dtype} would round the encoder and invalidate the codes in shards: leave it out, or "
                "start from a VQGAN saved in that type"
            )
        self.out, self.result, self.save_dtype = out, out / "config.json", save_dtype
        self.settings = self.recipe = recipe
        train_set, heldout_set = read_sets(data, heldout, recipe, out, on_progress)
        self.pixels, self.heldout = train_set.pixels, heldout_set.pixels
        self.learner = self.model = VQGANLearner(recipe).to(device)
        if init_from is not None:
            self.learner.start_from(init_from)
        self.optimizer = self.learner.optimizer
        self.identity = {"recipe": recipe.identity(), "pictures": self.pixels.digest()}
        if init_from is not None:
            self.identity["init_from"] = init_from.fingerprint()
        defaults = {"recipe": {"decoder_only": False}}
        saved = load_checkpoint(out, model=self.model, optimizer=self.optimizer, run=self.identity, defaults=defaults)
        self.progress = Progress(**(saved or {}))
        self.progress.unusable = dict(train_set.skipped + heldout_set.skipped)

    def batches(self, stopping: Callable[[], bool]) -> Generator[Tensor, None, None]:
        recipe, start = self.recipe, self.progress.step
        return shuffled_batches(len(self.pixels), recipe.batch_size, recipe.seed, start=start, steps=recipe.steps)

    def step(self, step: int, batch: Tensor) -> dict[str, float]:
        return self.learner.step(step, self.pixels[batch])

    def evaluate(self) -> None:
        if self.due(self.settings.heldout_every):
            self.measure(self.learner.vqgan, f"step-{self.progress.step:06d}")

    def write_result(self) -> None:
        self.learner.vqgan.save(self.out, self.save_dtype)
        if self.finished:  # who interrupts a run does not want to wait
            device = self.learner.vqgan.quant_conv.weight.device
            self.measure(VQGAN.load(self.out).to(device), "final")

    def measure(self, vqgan: VQGAN, name: str) -> None:
        """Write PSNR (dB, from the mean squared error over all pixels, in 0..1) and codebook usage for the held-out
        pictures to the metrics, and a sheet to reconstructions/."""
        codes, squared_error, values = [], 0.0, 0
        shown: list[Tensor] = []
        for originals, found, decoded in reconstructions(vqgan, self.heldout, self.recipe.precision):
            codes.append(found)
            squared_error += float((decoded - originals).double().square().sum())
            values += originals.numel()
            shown = shown or side_by_side(originals, decoded)
        use = codebook_use(torch.bincount(torch.cat(codes).flatten(), minlength=vqgan.config.codebook_size))
        psnr_db = -10 * math.log10(max(squared_error / values, 1e-10))
        self.progress.psnr_db, self.progress.codes_used = psnr_db, use.share
        self.metrics.write(
            self.progress.step,
            heldout_psnr_db=psnr_db,
            heldout_codes_used=use.share,
            heldout_codes_perplexity=use.perplexity,
        )
        save_sheet(self.out / "reconstructions" / f"{name}.png", shown)


def side_by_side(originals: Tensor, reconstructions: Tensor, width: int = 16) -> list[Tensor]:
    """Rows of `width` pictures, originals above their reconstructions; an incomplete last row is dropped."""
    if len(originals) < width:
        return [originals, reconstructions]
    whole = len(originals) - len(originals) % width
    pairs = zip(originals[:whole].split(width), reconstructions[:whole].split(width), strict=True)
    return [row for pair in pairs for row in pair]


def read_sets(
    data: Path, heldout: Path | None, recipe: VQGANRecipe, out: Path, on_progress: OnProgress | None
) -> tuple[ImageTextPairs, ImageTextPairs]:
    """The pictures to train on and those to measure on, stored in `out`."""
    side = recipe.crop_from or recipe.config.picture_side
    train_set = read_pictures(data, side, on_progress, store=out / "pictures.npy")
    if heldout is not None:
        heldout_set = read_pictures(heldout, side, on_progress, store=out / "heldout.npy")
    else:
        rows = range(len(train_set))
        heldout_set = replace(train_set.take(rows[::HELD_OUT_ONE_IN]), skipped=Counter())
        train_set = train_set.take([row for row in rows if row % HELD_OUT_ONE_IN])
    return train_set, heldout_set.subsample(recipe.heldout_pictures)
