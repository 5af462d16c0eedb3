"""A training run on one machine: its parts, what it measures, and how it saves and resumes.

OUT gets model/ (a model folder), checkpoint/, tokenizer.json, vocabulary.json, metrics.jsonl, tensorboard/ and
samples/.
"""

import dataclasses
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dalle_lean import DalleConfig, save_model
from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import sha256_file
from dalle_lean.progress import OnProgress
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet, find_shards, is_url
from training.data.loader import Batch, TrainingData, collate
from training.data.remote_io import silent
from training.data.sampler import Position
from training.data.validation import heldout_rows
from training.run.checkpoint import load_checkpoint, save_checkpoint
from training.run.folder import place_tokenizer, place_vocabulary, placed_vocabulary, remove_leftovers
from training.run.graceful_stop import TimeLimit, interrupt_deferred
from training.run.metrics import MetricsLog, Throughput
from training.run.previews import draw_codes, save_sheet
from training.run.progress import OnNotice, Progress
from training.run.recipe import DataRecipe, OptimizerRecipe, Recipe
from training.run.schedule import crop_of_step, learning_rate
from training.step.build import build_model, matching_vqgan, new_config, refuse_other_codes, stated_codes
from training.step.learner import Learner
from training.step.memory_budget import most_words, refuse_lack_of_memory

NUM_SAMPLES = 8


def train(
    data: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    tokenizer: Path | None = None,
    heldout: str | Path | None = None,
    vqgan: Path | None = None,
    init: Path | None = None,
    device: str = "cpu",
    max_minutes: float | None = None,
    on_progress: OnProgress | None = None,
    on_notice: OnNotice | None = None,
) -> Progress:
    """Train on the shards `data`, or continue the run that `out` holds; returns how it ended.

    Args:
        data: a folder, or the URL of one; see training.data.catalog.find_shards.
        tokenizer: a tokenizer.json; without it `init`'s, else one is made from the captions.
        heldout: shards to measure on; without it a share of `data` is left out of the training.
        vqgan: the folder of the VQGAN that made the codes: draws samples, and goes into the model folder.
        init: a model folder to start from; the recipe's [model] does not count then.
        max_minutes: after which the run stops where it is, saved; the time to begin counts. The same call goes on.
        on_progress: called after each step with samples done, samples in all, and a note.
        on_notice: called upon Ctrl+C and SIGTERM, when the run turns out to be finished already, for a damaged shard,
            and while data is waited for.

    Raises:
        TrainingDiverged: see OptimizerRecipe.max_skipped_in_row; the last checkpoint and model stay as they were.
        Unreachable: data on another machine could not be read for a long time; the last checkpoint stays.
        ValueError: recipe, data, tokenizer, VQGAN or the run in `out` do not fit together.
        KeyboardInterrupt, Terminated: on Ctrl+C or SIGTERM, once the step is finished and saved.
    """
    limit = TimeLimit(max_minutes)
    run = Run(
        data,
        out,
        recipe,
        tokenizer=tokenizer,
        heldout=heldout,
        vqgan=vqgan,
        init=init,
        device=device,
        on_notice=on_notice,
    )
    run.go(on_progress, limit)
    return run.progress


class Run:
    """One run: its parts, all checked against each other, in the state its folder holds."""

    def __init__(
        self,
        data: str | Path,
        out: Path,
        recipe: Recipe,
        *,
        tokenizer: Path | None = None,
        heldout: str | Path | None = None,
        vqgan: Path | None = None,
        init: Path | None = None,
        device: str = "cpu",
        on_notice: OnNotice | None = None,
    ):
        self.out, self.recipe, self.vqgan_folder, self.on_notice = out, recipe, vqgan, on_notice or silent
        codes = stated_codes(recipe, vqgan) if is_url(str(data)) else None
        shards = find_shards(data, codes=codes, on_notice=self.on_notice)
        self.info = shards.info
        heldout_shards = find_shards(heldout, on_notice=self.on_notice) if heldout is not None else None
        if heldout_shards is not None:
            refuse_other_codes(heldout_shards, shards)
        self.vqgan = matching_vqgan(vqgan, self.info) if vqgan else None
        self.data = TrainingData(
            shards=shards,
            heldout_share=0.0 if heldout_shards else recipe.data.heldout_share,
            shuffle_buffer=recipe.data.shuffle_buffer,
            shuffle_shards=recipe.data.shuffle_shards,
            seed=recipe.data.seed,
            caption_dropout=recipe.data.caption_dropout,
        )
        source = tokenizer or (init / "tokenizer.json" if init else None)
        if init is None:
            words = Tokenizer.from_file(source).vocab_size if source else most_words(recipe)
            refuse_lack_of_memory(new_config(recipe, self.info, words), recipe, torch.device(device))
        self.tokenizer = place_tokenizer(out, source, self.data.captions(), recipe.data.text_vocab_size)
        torch.manual_seed(recipe.data.seed)
        self.model = build_model(recipe, self.info, self.tokenizer.vocab_size, init)
        if init is not None:
            refuse_lack_of_memory(self.model.config, recipe, torch.device(device))
        self.model.to(device)
        self.learner = Learner(self.model, recipe)
        sections = recipe.to_dict()
        self.identity = {
            "model": self.model.config.to_dict(),
            "optimizer": sections["optimizer"],
            "data": sections["data"],
            "dataset.json": shards.fingerprint,
            "tokenizer": sha256_file(source) if source else None,
            "held-out shards": heldout_shards.fingerprint if heldout_shards else None,
            "first weights": sha256_file(init / "config.json") if init else None,
        }
        self.progress = self.restore()
        remove_leftovers(out)
        if not self.finished:
            place_vocabulary(out, init, self.data.mixed_captions())
        self.heldout = None if self.finished else self.heldout_batch(heldout_shards)
        self.saved_step = self.progress.step
        self.pace = Throughput()

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.progress.step >= self.recipe.schedule.total_steps

    def heldout_batch(self, shards: ShardSet | None) -> Batch | None:
        """What is measured: rows of the held-out shards, or of those that the training leaves out."""
        share = 1.0 if shards else self.data.heldout_share
        rows = heldout_rows(shards or self.data.shards, share, self.recipe.data.heldout_samples)
        return collate(rows, self.tokenizer, self.model.config.text_len) if len(rows) else None

    def go(self, on_progress: OnProgress | None = None, limit: TimeLimit | None = None) -> None:
        """All steps that are left, or those before the `limit`; see `train`."""
        if not self.finished:
            self.learn(on_progress, limit or TimeLimit(None))
        else:
            self.on_notice(f"already finished at step {self.progress.step}")
        self.finish()

    def learn(self, on_progress: OnProgress | None, limit: TimeLimit) -> None:
        """Step after step; Ctrl+C, SIGTERM and the `limit` end it once all is saved."""
        total_steps, batch_size = self.recipe.schedule.total_steps, self.recipe.data.batch_size

        def tell() -> None:
            if on_progress is not None:
                note = self.progress.note(total_steps)
                on_progress(self.progress.step * batch_size, total_steps * batch_size, note)

        tell()
        with (
            MetricsLog(self.out, self.progress.step) as metrics,
            interrupt_deferred(self.on_notice) as interrupted,
            closing(self.batches(lambda: interrupted() or limit.reached())) as batches,
        ):
            for batch, position in batches:
                self.take_step(batch, position, metrics)
                self.look(metrics)
                tell()
                if interrupted() or limit.reached():
                    break
            if not self.finished:
                self.stop()
            interrupted.end()

    def batches(self, stopping: Callable[[], bool] | None = None) -> Generator[tuple[Batch, Position], None, None]:
        """The batches that are left, each with the data position behind it; a thread makes them ahead of need.

        They end early where `stopping` is true while waiting for data.
        """
        remaining = self.recipe.schedule.total_steps - self.progress.step
        size, length = self.recipe.data.batch_size, self.model.config.text_len
        batches = self.data.batches(size, self.tokenizer, length, self.progress.position)
        pin = self.learner.device.type == "cuda"
        return self.data.ahead(islice(batches, remaining), pin=pin, stop_waiting=stopping)

    def take_step(self, batch: Batch, position: Position, metrics: MetricsLog) -> None:
        """Learn from a batch; a step that is not finite is skipped, recorded and, many in a row, the end."""
        progress, schedule, config = self.progress, self.recipe.schedule, self.model.config
        step = progress.step + 1
        if position.skipped > progress.position.skipped:
            metrics.write(step, damaged_shards=position.skipped)
        progress.position = position
        crop = crop_of_step(step, schedule.length_warmup, config.image_side, self.recipe.data.seed)
        progress.sample_tokens = crop.text_len + crop.side**2 if crop else config.sequence_len
        tokens = progress.sample_tokens * len(batch.text_ids)
        progress.tokens += tokens
        lr = learning_rate(
            step,
            peak=schedule.peak_lr,
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.total_steps,
        )
        loss, grad_norm, rescaled = self.learner.step(batch, lr, crop)
        numbers = {"loss": loss, "grad_norm": grad_norm}
        self.pace.count(samples=len(batch.text_ids), tokens=tokens)
        if rescaled:
            progress.step, progress.rescaled = step, progress.rescaled + 1
            metrics.write(step, rescaled=progress.rescaled)
        elif not progress.count_step(numbers):
            metrics.write(progress.step, skipped=progress.skipped)
            progress.refuse_divergence(
                numbers, self.recipe.optimizer.max_skipped_in_row, out=self.out, saved_step=self.saved_step
            )
        elif self.due(schedule.log_every):
            rates = self.pace.per_second()
            progress.tokens_per_s = rates["tokens_per_s"]
            metrics.write(step, **numbers, lr=lr, **rates, tokens=progress.tokens, sample_tokens=progress.sample_tokens)

    def look(self, metrics: MetricsLog) -> None:
        """What is due after this step: held-out loss, samples, checkpoint."""
        progress, schedule = self.progress, self.recipe.schedule
        if self.heldout and self.due(schedule.heldout_every):
            measured = self.learner.measure(self.heldout)
            progress.heldout_image_bits = measured["heldout_image_bits"]
            metrics.write(progress.step, **measured)
        if self.heldout and self.vqgan and self.due(schedule.sample_every):
            self.draw(self.heldout, self.vqgan)
        if self.unsaved and self.due(schedule.checkpoint_every):
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
        self.learner.finish()
        with self.learner.autocast():
            codes = draw_codes(self.model, text_ids.to(self.learner.device), generator)
        save_sheet(path, [vqgan.decode(image_codes), vqgan.decode(codes.cpu())])

    def save(self) -> None:
        """Write the model folder and the checkpoint."""
        # The checkpoint comes last: once it says that the run is finished, the model folder is never written again.
        self.save_model()
        self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Write all that a killed run needs, what a delayed step has not given out yet included."""
        save_checkpoint(self.out, **self.moving, progress=dataclasses.asdict(self.progress), run=self.identity)
        self.saved_step = self.progress.step

    def save_model(self) -> None:
        """Write the model folder."""
        self.learner.finish()
        save_model(
            self.model,
            self.out / "model",
            tokenizer=self.out / "tokenizer.json",
            vocabulary=placed_vocabulary(self.out),
            vqgan=self.vqgan_folder,
            vqgan_fingerprint=self.info.vqgan,
            caption_dropout=self.recipe.data.caption_dropout,
        )

    def restore(self) -> Progress:
        """The state of the checkpoint, or the beginning."""
        earlier = {
            "model": DalleConfig().to_dict(),
            "optimizer": dataclasses.asdict(OptimizerRecipe()),
            "data": dataclasses.asdict(DataRecipe()),
        }
        saved = load_checkpoint(self.out, **self.moving, run=self.identity, defaults=earlier)
        if saved is None:
            return Progress()
        place = saved.pop("position")
        if isinstance(place, dict):
            return Progress(**saved, position=Position.from_dict(place))
        if saved["step"] < self.recipe.schedule.total_steps:
            raise UserError(
                f"{self.out} holds a run of an earlier version, whose order of the data is not made any more: "
                f"finish it with that version, or begin another run from its model with --init {self.out / 'model'}"
            )
        return Progress(**saved)

    @property
    def moving(self) -> dict[str, Any]:
        """What a checkpoint holds beside the progress."""
        return {"model": self.model, "optimizer": self.learner.optimizer, "scales": self.model.scales}

    @property
    def unsaved(self) -> bool:
        """Whether there is something new that is worth keeping: many bad steps may be the fault of the weights."""
        return self.progress.skipped_in_row == 0 and self.saved_step < self.progress.step

    def stop(self) -> None:
        """Save where a signal or the time limit fell."""
        if self.unsaved:
            # First, with the weights where they are: giving out a delayed step here would make another run of it.
            self.save_checkpoint()
            self.save_model()
        self.finish()

    def finish(self) -> None:
        """Leave everything saved."""
        if self.unsaved:
            self.save()
        elif not (self.out / "model").exists():
            self.save_model()
        self.learner.finish()
