"""A training run on one machine: what it is made of, what it looks at on its way, and how it survives.

OUT gets model/ (a model folder), checkpoint/, tokenizer.json, metrics.jsonl, tensorboard/ and samples/.
"""

import dataclasses
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dalle_lean import Dalle, load_model, save_model
from dalle_lean.files import read_json, sha256_file
from dalle_lean.folder import bundled_model
from dalle_lean.progress import OnProgress
from dalle_lean.vqgan import VQGAN
from preprocessing.shards import DatasetInfo, read_dataset_info
from training.checkpoint import load_checkpoint, save_checkpoint
from training.data import Batch, Position, TrainingData, captions, collate, heldout_rows
from training.interrupt import interrupt_deferred
from training.learner import Learner
from training.metrics import MetricsLog
from training.progress import OnNotice, StepCount
from training.recipe import Recipe
from training.run_folder import place_tokenizer
from training.samples import draw_codes, save_sheet
from training.schedule import learning_rate

NUM_SAMPLES = 8


@dataclass
class Progress(StepCount):
    """The numbers of this run that move."""

    position: Position = field(default_factory=Position)
    heldout_image_bits: float = math.nan
    """The last time it was measured."""

    def findings(self) -> list[str]:
        if math.isfinite(self.heldout_image_bits):
            return [f"held-out {self.heldout_image_bits:.3f} bits/code"]
        return []


def train(
    data: Path,
    out: Path,
    recipe: Recipe,
    *,
    tokenizer: Path | None = None,
    heldout: Path | None = None,
    vqgan: Path | None = None,
    init: Path | None = None,
    device: str = "cpu",
    on_progress: OnProgress | None = None,
    on_notice: OnNotice | None = None,
) -> Progress:
    """Train on the shards `data`, or continue the run that `out` holds; returns how it ended.

    Args:
        tokenizer: a tokenizer.json; without it `init`'s, else one is made from the captions.
        heldout: shards to measure on; without it a share of `data` is left out of the training.
        vqgan: the folder of the VQGAN that made the codes: draws samples, and goes into the model folder.
        init: a model folder to start from; the recipe's [model] does not count then.
        on_progress: called after each step with samples done, samples in all, and a note.
        on_notice: called when Ctrl+C was pressed, and when the run turns out to be finished already.

    Raises:
        TrainingDiverged: see OptimizerRecipe.max_skipped_in_row; the last checkpoint and model stay as they were.
        ValueError: recipe, data, tokenizer, VQGAN or the run in `out` do not fit together.
        KeyboardInterrupt: on Ctrl+C, once the step is finished and saved.
    """
    run = Run(data, out, recipe, tokenizer=tokenizer, heldout=heldout, vqgan=vqgan, init=init, device=device)
    run.go(on_progress, on_notice)
    return run.progress


class Run:
    """One run: its parts, all checked against each other, in the state its folder holds."""

    def __init__(
        self,
        data: Path,
        out: Path,
        recipe: Recipe,
        *,
        tokenizer: Path | None = None,
        heldout: Path | None = None,
        vqgan: Path | None = None,
        init: Path | None = None,
        device: str = "cpu",
    ):
        self.out, self.recipe, self.vqgan_folder = out, recipe, vqgan
        self.info = read_dataset_info(data)
        if heldout is not None:
            refuse_other_codes(heldout, data, self.info)
        self.vqgan = matching_vqgan(vqgan, self.info) if vqgan else None
        self.data = TrainingData(
            folder=data,
            heldout_share=0.0 if heldout else recipe.data.heldout_share,
            shuffle_buffer=recipe.data.shuffle_buffer,
            seed=recipe.data.seed,
        )
        source = tokenizer or (init / "tokenizer.json" if init else None)
        self.tokenizer = place_tokenizer(out, source, captions(self.data), recipe.data.text_vocab_size)
        torch.manual_seed(recipe.data.seed)
        self.model = build_model(recipe, self.info, self.tokenizer.vocab_size, init).to(device)
        self.learner = Learner(self.model, recipe)
        sections = recipe.to_dict()
        self.identity = {
            "model": self.model.config.to_dict(),
            "optimizer": sections["optimizer"],
            "data": sections["data"],
            "dataset.json": sha256_file(data / "dataset.json"),
            "tokenizer": sha256_file(source) if source else None,
            "held-out shards": sha256_file(heldout / "dataset.json") if heldout else None,
            "first weights": sha256_file(init / "config.json") if init else None,
        }
        self.progress = self.restore()
        remove_leftovers(out)
        rows = [] if self.finished else heldout_rows(self.data, heldout, recipe.data.heldout_samples)
        self.heldout = collate(rows, self.tokenizer, self.model.config.text_len) if rows else None
        self.saved_step = self.progress.step
        self.clock, self.clock_step = time.perf_counter(), self.progress.step

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.progress.step >= self.recipe.schedule.total_steps

    def go(self, on_progress: OnProgress | None = None, on_notice: OnNotice | None = None) -> None:
        """All steps that are left; see `train`."""
        if not self.finished:
            self.learn(on_progress, on_notice)
        elif on_notice is not None:
            on_notice(f"already finished at step {self.progress.step}")
        self.finish()

    def learn(self, on_progress: OnProgress | None, on_notice: OnNotice | None) -> None:
        """Step after step; Ctrl+C ends it once all is saved."""
        total_steps, batch_size = self.recipe.schedule.total_steps, self.recipe.data.batch_size

        def tell() -> None:
            if on_progress is not None:
                note = self.progress.note(total_steps)
                on_progress(self.progress.step * batch_size, total_steps * batch_size, note)

        tell()
        with MetricsLog(self.out, self.progress.step) as metrics, interrupt_deferred(on_notice) as interrupted:
            for batch, position in self.batches():
                self.take_step(batch, position, metrics)
                self.look(metrics)
                tell()
                if interrupted():
                    self.finish()
                    raise KeyboardInterrupt

    def batches(self) -> Iterator[tuple[Batch, Position]]:
        """The batches that are left, each with the data position behind it."""
        remaining = range(self.progress.step, self.recipe.schedule.total_steps)
        size, length = self.recipe.data.batch_size, self.model.config.text_len
        batches = self.data.batches(size, self.tokenizer, length, self.progress.position)
        return (batch for _, batch in zip(remaining, batches, strict=False))

    def take_step(self, batch: Batch, position: Position, metrics: MetricsLog) -> None:
        """Learn from a batch; a step that is not finite is skipped, recorded and, many in a row, the end."""
        progress, schedule = self.progress, self.recipe.schedule
        progress.position = position
        lr = learning_rate(
            progress.step + 1,
            peak=schedule.peak_lr,
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.total_steps,
        )
        loss, grad_norm = self.learner.step(batch, lr)
        numbers = {"loss": loss, "grad_norm": grad_norm}
        if not progress.count_step(numbers):
            metrics.write(progress.step, skipped=progress.skipped)
            progress.refuse_divergence(
                numbers, self.recipe.optimizer.max_skipped_in_row, out=self.out, saved_step=self.saved_step
            )
        elif self.due(schedule.log_every):
            now = time.perf_counter()
            rate = (progress.step - self.clock_step) * len(batch.text_ids) / (now - self.clock)
            self.clock, self.clock_step = now, progress.step
            metrics.write(progress.step, **numbers, lr=lr, samples_per_s=rate)

    def look(self, metrics: MetricsLog) -> None:
        """What is due after this step: held-out loss, samples, checkpoint."""
        progress, schedule = self.progress, self.recipe.schedule
        if self.heldout and self.due(schedule.heldout_every):
            measured = self.learner.measure(self.heldout)
            progress.heldout_image_bits = measured["heldout_image_bits"]
            metrics.write(progress.step, **measured)
        if self.heldout and self.vqgan and self.due(schedule.sample_every):
            self.draw(self.heldout, self.vqgan)
        # Many bad steps may be the fault of the weights: what was saved before them stays.
        if progress.skipped_in_row == 0 and self.due(schedule.checkpoint_every):
            self.save()

    def due(self, interval: int) -> bool:
        """Whether something done every `interval` steps (0: never) is to be done now; at the last step all of it is."""
        at_end = self.progress.step == self.recipe.schedule.total_steps
        return interval > 0 and (at_end or self.progress.step % interval == 0)

    def draw(self, heldout: Batch, vqgan: VQGAN) -> None:
        """Write samples/step-NNNNNN.png for the first held-out captions."""
        path = self.out / "samples" / f"step-{self.progress.step:06d}.png"
        generator = torch.Generator().manual_seed(self.recipe.data.seed)
        text_ids, image_codes = (part[:NUM_SAMPLES] for part in heldout)
        with self.learner.autocast():
            codes = draw_codes(self.model, text_ids.to(self.learner.device), generator)
        save_sheet(path, [vqgan.decode(image_codes), vqgan.decode(codes.cpu())])

    def save(self) -> None:
        """Write the model folder and the checkpoint."""
        state = {**dataclasses.asdict(self.progress), "position": tuple(self.progress.position)}
        # The checkpoint comes last: once it says that the run is finished, the model folder is never written again.
        self.save_model()
        save_checkpoint(self.out, model=self.model, optimizer=self.learner.optimizer, progress=state, run=self.identity)
        self.saved_step = self.progress.step

    def save_model(self) -> None:
        """Write the model folder."""
        save_model(
            self.model,
            self.out / "model",
            tokenizer=self.out / "tokenizer.json",
            vqgan=self.vqgan_folder,
            vqgan_fingerprint=self.info.vqgan,
        )

    def restore(self) -> Progress:
        """The state of the checkpoint, or the beginning."""
        saved = load_checkpoint(self.out, model=self.model, optimizer=self.learner.optimizer, run=self.identity)
        return Progress(**{**saved, "position": Position(*saved["position"])}) if saved else Progress()

    def finish(self) -> None:
        """Leave everything saved."""
        if self.progress.skipped_in_row == 0 and self.saved_step < self.progress.step:
            self.save()
        elif not (self.out / "model").exists():
            self.save_model()


def build_model(recipe: Recipe, info: DatasetInfo, vocab_size: int, init: Path | None) -> Dalle:
    """The recipe's model with new weights, or `init`; ValueError where it does not fit the data and the tokenizer."""
    sizes = {"image_side": info.image_side, "image_vocab_size": info.codebook_size, "text_vocab_size": vocab_size}
    if init is None:
        return Dalle(recipe.model_config(**sizes))
    model = load_model(init)
    recorded = read_json(init / "config.json")["vqgan_fingerprint"]
    if recorded is not None and recorded != info.vqgan:
        raise ValueError(f"{init} was trained on codes of the VQGAN {recorded[:12]}, the data is of {info.vqgan[:12]}")
    dataclasses.replace(recipe, model=model.config.to_dict()).model_config(**sizes)
    return model


def bundled_vqgan(data: Path) -> Path | None:
    """The bundled model's VQGAN, if it is the one that made the codes of the shards `data`."""
    try:
        folder = bundled_model()
    except ValueError:  # this installation has none
        return None
    made_them = read_json(folder / "config.json")["vqgan_fingerprint"] == read_dataset_info(data).vqgan
    return folder / "vqgan" if made_them else None


def refuse_other_codes(heldout: Path, data: Path, info: DatasetInfo) -> None:
    """ValueError unless the codes of the shards `heldout` mean what those of `data` mean."""
    theirs = read_dataset_info(heldout)
    for name in ("vqgan", "image_side", "codebook_size"):
        if getattr(theirs, name) != getattr(info, name):
            raise ValueError(
                f"{heldout} has {name} {getattr(theirs, name)}, but {data} has {getattr(info, name)}; "
                "preprocess both with the same --vqgan and --picture-side"
            )


def matching_vqgan(folder: Path, info: DatasetInfo) -> VQGAN:
    """The VQGAN of a folder; ValueError unless it is the one that made the codes."""
    vqgan = VQGAN.load(folder)
    if vqgan.fingerprint() != info.vqgan:
        raise ValueError(
            f"{folder} is the VQGAN {vqgan.fingerprint()[:12]}, but the data's codes are of {info.vqgan[:12]}; "
            "give the folder that the data was preprocessed with"
        )
    return vqgan


def remove_leftovers(out: Path) -> None:
    """Remove what a killed process left half-written of this run: hidden names ending in .tmp."""
    for pattern in (".*.tmp", "checkpoint/.*.tmp", "samples/.*.tmp"):
        for path in out.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
