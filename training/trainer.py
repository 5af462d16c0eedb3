"""Training of the transformer, in one process or in several that torchrun started.

OUT gets model/ (a model folder), checkpoint/, tokenizer.json, vocabulary.json, metrics.jsonl, tensorboard/ and
samples/.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch

from dalle_lean import Dalle, DalleConfig, save_model
from dalle_lean.errors import UserError
from dalle_lean.io.files import sha256_file
from dalle_lean.precision import effective_precision
from dalle_lean.progress import OnProgress
from dalle_lean.tokenizer import Tokenizer
from dalle_lean.words import counted
from training.data.catalog import ShardSet, find_shards, is_url
from training.data.heldout import heldout_rows
from training.data.loader import Batch, TrainingData, collate
from training.data.sampler import Position
from training.run.checkpoint import load_checkpoint
from training.run.draws import crop_of_step
from training.run.folder import place_tokenizer, place_vocabulary, placed_vocabulary
from training.run.graceful_stop import TimeLimit
from training.run.loop import TrainingRun
from training.run.loop_settings import LoopSettings
from training.run.previews import draw_codes, save_samples
from training.run.processes import ALONE, Processes, open_processes
from training.run.progress import StepCount
from training.run.recipe import SHARED_SCHEDULE, DataRecipe, OptimizerRecipe, Recipe
from training.step.build import build_model, check_same_codes, matching_vqgan, new_config, stated_codes, with_model_of
from training.step.data_parallel import sharded, use_fsdp, whole_model
from training.step.learner import Learner

logger = logging.getLogger(__name__)
NUM_SAMPLES = 8


@dataclass
class Progress(StepCount):
    loss_unit: ClassVar[str] = "nats/token"
    position: Position = field(default_factory=Position)
    tokens: int = 0
    """Sequence positions trained on."""
    sample_tokens: int = 0
    """Positions per sample, which a length warm-up raises."""
    heldout_loss: float = math.nan
    heldout_image_bits: float = math.nan
    """These two: the latest measurements."""
    rescaled: int = 0
    """Steps that only lowered a scale of float16 gradients."""

    def details(self) -> list[str]:
        words = []
        if math.isfinite(self.heldout_loss):
            words.append(f"held-out loss {self.heldout_loss:.4g} {self.loss_unit}")
        if math.isfinite(self.heldout_image_bits):
            words.append(f"held-out pictures {self.heldout_image_bits:.3f} bits/code")
        if self.sample_tokens:
            words.append(f"{self.sample_tokens} tokens a sample")
        if self.rescaled:
            words.append(f"{counted(self.rescaled, 'step')} skipped (gradient scales lowered)")
        if self.position.skipped:
            words.append(f"{counted(self.position.skipped, 'damaged shard')} skipped")
        return words


def train(
    data: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    device: str = "cpu",
    max_minutes: float | None = None,
    on_progress: OnProgress | None = None,
    **inputs: Any,
) -> Progress:
    """Train on the shards `data`, or continue the run that `out` holds, and return its progress.

    Args:
        data: a folder or its URL; see training.data.catalog.find_shards.
        inputs: tokenizer, heldout, vqgan, init and parallel, as of `DalleRun`.
        device: "cpu", "cuda" or a GPU; with torchrun, every process calls this and takes its own GPU.
        max_minutes: time limit, start-up included; the run is saved then, and the same call continues it.
        on_progress: called after each step with (samples done, total samples, note).

    Raises as `TrainingRun.run` does, and:
        Unreachable: a remote kept failing for too long; the last checkpoint is kept.
        ValueError: recipe, data, tokenizer, VQGAN and the run in `out` do not match, finished or not.
    """
    limit, processes = TimeLimit(max_minutes), open_processes(device)
    with processes.together():
        return DalleRun(data, out, recipe, processes, **inputs).run(on_progress, limit)


class DalleRun(TrainingRun[tuple[Batch, Position], Progress]):
    """A run with its parts checked against each other, in the state of its folder; see `train`.

    Args:
        tokenizer: a tokenizer.json; by default `init`'s, else one trained on the captions.
        heldout: shards to measure on; by default a share of the data, which is not trained on.
        vqgan: folder of the VQGAN that made the codes; it draws samples and goes into the model folder.
        init: a model folder to start from, whose model replaces the recipe's.
        parallel: "ddp", "fsdp" or None; see training.step.data_parallel.use_fsdp.
    """

    unit = "samples"
    model: Dalle

    def __init__(
        self,
        data: str | Path,
        out: Path,
        recipe: Recipe,
        processes: Processes = ALONE,
        *,
        tokenizer: Path | None = None,
        heldout: str | Path | None = None,
        vqgan: Path | None = None,
        init: Path | None = None,
        parallel: str | None = None,
    ):
        recipe = with_model_of(recipe, init)
        self.processes, share = processes, recipe.share_of(processes.world)
        self.out, self.result, self.recipe, self.vqgan_folder = out, out / "model", recipe, vqgan
        self.settings = LoopSettings(
            steps=recipe.schedule.total_steps,
            batch_size=recipe.data.batch_size,
            max_skipped_in_row=recipe.optimizer.max_skipped_in_row,
            log_every=recipe.schedule.log_every,
            heldout_every=recipe.schedule.heldout_every,
            checkpoint_every=recipe.schedule.checkpoint_every,
        )
        codes = stated_codes(recipe, vqgan) if is_url(str(data)) else None
        shards = find_shards(data, codes=codes, on_notice=logger.info)
        self.info = shards.info
        heldout_shards = find_shards(heldout, on_notice=logger.info) if heldout is not None else None
        if heldout_shards is not None:
            check_same_codes(heldout_shards, shards)
        self.vqgan = matching_vqgan(vqgan, self.info) if vqgan else None
        kept = dataclasses.replace(recipe.data, heldout_share=0.0) if heldout_shards else recipe.data
        self.data = TrainingData(shards, kept)
        source = tokenizer or (init / "tokenizer.json" if init else None)
        largest_vocab = recipe.model.get("text_vocab_size", recipe.data.text_vocab_size)
        vocab_size = Tokenizer.from_file(source).vocab_size if source else largest_vocab
        shard_model = use_fsdp(parallel, new_config(recipe, self.info, vocab_size), share, processes)
        if processes.first:
            place_tokenizer(out, source, self.data.captions(), recipe.data.text_vocab_size)
        processes.wait()
        self.tokenizer = Tokenizer.from_file(out / "tokenizer.json")
        torch.manual_seed(recipe.data.seed)
        if shard_model:
            first = build_model(recipe, self.info, self.tokenizer.vocab_size, init) if processes.first else None
            self.model = sharded(first, processes)
        else:
            self.model = build_model(recipe, self.info, self.tokenizer.vocab_size, init).to(processes.device)
        self.learner = Learner(self.model, share, processes)
        self.optimizer, self.scales = self.learner.optimizer, self.model.scales
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
        self.identity["schedule"] = {name: sections["schedule"][name] for name in SHARED_SCHEDULE}
        self.heldout: Batch | None = None
        if not self.finished:
            if processes.first:
                place_vocabulary(out, init, self.data.mixed_captions())
                precision = effective_precision(processes.device.type, recipe.memory.precision)
                weights = sum(parameter.numel() for parameter in self.model.parameters())
                logger.info(
                    f"training {weights:,} weights in {precision} on {processes.device}, "
                    f"{counted(recipe.data.batch_size, 'sample')} a step"
                )
            self.heldout = self.heldout_batch(heldout_shards)

    def restore(self) -> Progress:
        """Restore the checkpoint, if there is one, and return the progress."""
        defaults = {
            "model": DalleConfig().to_dict(),
            "optimizer": dataclasses.asdict(OptimizerRecipe()),
            "data": dataclasses.asdict(DataRecipe()),
        }
        saved = load_checkpoint(
            self.out,
            model=self.model,
            optimizer=self.optimizer,
            scales=self.scales,
            run=self.identity,
            defaults=defaults,
            schedule=self.recipe.schedule,
        )
        if saved is None:
            return Progress()
        position = saved.pop("position")
        saved.pop("tokens_per_s", None)  # earlier versions kept it
        if isinstance(position, dict):
            return Progress(**saved, position=Position.from_dict(position))
        if saved["step"] < self.settings.steps:
            raise UserError(
                f"{self.out} holds a run of an earlier version, whose order of the data is no longer supported: finish "
                f"it with that version, or start a new run from its model with --init {self.out / 'model'}"
            )
        return Progress(**saved)

    def heldout_batch(self, shards: ShardSet | None) -> Batch | None:
        """Rows to measure on: of the held-out shards, or those left out of the training."""
        share = 1.0 if shards else self.data.recipe.heldout_share
        rows = heldout_rows(shards or self.data.shards, share, self.recipe.data.heldout_samples)
        self.heldout_captions = rows.captions[:NUM_SAMPLES]
        return collate(rows, self.tokenizer, self.model.config.text_len) if len(rows) else None

    def batches(self, stopping: Callable[[], bool] | None = None) -> Generator[tuple[Batch, Position], None, None]:
        """This process's shares of the remaining batches, each with the data position after the whole batch.

        A thread of the first process prefetches them; the others read no training rows.
        """
        remaining = self.settings.steps - self.progress.step if self.processes.first else 0
        size, length = self.settings.batch_size, self.model.config.text_len
        batches = self.data.batches(size, self.tokenizer, length, self.progress.position)
        pin = self.learner.device.type == "cuda"
        ahead = self.data.ahead(islice(batches, remaining), pin=pin, stop_waiting=stopping)
        return ahead if self.processes.world == 1 else self.shares(ahead)

    def shares(
        self, batches: Generator[tuple[Batch, Position], None, None]
    ) -> Generator[tuple[Batch, Position], None, None]:
        """This process's shares of the first process's batches."""
        with closing(batches):
            while True:
                batch, position = next(batches, (None, None))
                if (position := self.processes.from_first(position)) is None:
                    return
                if batch is not None:
                    self.model.check_inputs(*batch)
                yield Batch(*self.processes.share(batch)), position

    def step(self, step: int, batch: tuple[Batch, Position]) -> Mapping[str, float] | None:
        samples, position = batch
        progress, schedule, config = self.progress, self.recipe.schedule, self.model.config
        if position.skipped > progress.position.skipped:
            self.metrics.write(step, damaged_shards=position.skipped)
        progress.position = position
        crop = crop_of_step(step, schedule.length_warmup, config.image_side, self.recipe.data.seed)
        progress.sample_tokens = crop.text_len + crop.side**2 if crop else config.sequence_len
        tokens = progress.sample_tokens * self.settings.batch_size
        progress.tokens += tokens
        self.throughput.count(tokens=tokens)
        lr = schedule.learning_rate(step)
        loss, grad_norm, rescaled = self.learner.step(samples, lr, crop)
        if rescaled:
            progress.rescaled += 1
            self.metrics.write(step, rescaled=progress.rescaled)
            return None
        return {"loss": loss, "grad_norm": grad_norm, "lr": lr}

    def log(self, numbers: Mapping[str, float], rates: Mapping[str, float]) -> None:
        progress = self.progress
        sizes = {"tokens": progress.tokens, "sample_tokens": progress.sample_tokens}
        self.metrics.write(progress.step, **numbers, **rates, **sizes)

    def evaluate(self) -> None:
        if self.heldout and self.due(self.settings.heldout_every):
            measured = self.learner.measure(self.heldout)
            self.progress.heldout_loss = measured["heldout_loss"]
            self.progress.heldout_image_bits = measured["heldout_image_bits"]
            self.metrics.write(self.progress.step, **measured)
        if self.heldout and self.due(self.recipe.schedule.sample_every):
            self.draw_samples(self.heldout)

    def draw_samples(self, heldout: Batch) -> None:
        """Write samples/step-NNNNNN.png for the first held-out captions, if there is a VQGAN."""
        if self.vqgan is None:
            return
        model = whole_model(self.model, self.processes)
        if not self.processes.first:
            return
        path = self.out / "samples" / f"step-{self.progress.step:06d}.png"
        text_ids, image_codes = (part[:NUM_SAMPLES] for part in heldout)
        codes = draw_codes(model.to(self.learner.device), text_ids, seed=self.recipe.data.seed)
        save_samples(path, self.vqgan.decode(image_codes), self.vqgan.decode(codes.cpu()), self.heldout_captions)

    def save(self) -> None:
        self.write_result()
        self.save_checkpoint()

    def write_result(self) -> None:
        model = whole_model(self.model, self.processes)
        if not self.processes.first:
            return
        save_model(
            model,
            self.result,
            tokenizer=self.out / "tokenizer.json",
            vocabulary=placed_vocabulary(self.out),
            vqgan=self.vqgan_folder,
            vqgan_fingerprint=self.info.vqgan,
            caption_dropout=self.recipe.data.caption_dropout,
        )
