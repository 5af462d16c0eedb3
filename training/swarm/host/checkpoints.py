"""Several states of a run, each a folder that is whole or not there, and the way back to one of them.

RUN_DIR/checkpoints/step-NNNNNN/ has model/ (a model folder), state.safetensors (the optimizer's statistics) and
checkpoint.json, which names the step, the run and what the files hash to.
"""

import dataclasses
import fcntl
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from dalle_lean import Dalle, load_model, save_model
from dalle_lean.errors import UserError
from dalle_lean.io.files import fresh_folder, read_json, sha256_file, sync_folder, write_json
from dalle_lean.io.safetensors_io import read_weights, save_weights
from training.data.remote_io import silent
from training.run.folder import placed_vocabulary
from training.run.progress import OnNotice
from training.swarm.config import NAME as SETTINGS
from training.swarm.config import SwarmSettings, read_settings, write_settings

FOLDER = "checkpoints"
META = "checkpoint.json"
STATE = "state.safetensors"
HASHED = ("model/config.json", "model/model.safetensors", STATE)
GIVEN_UP = "given-up"
LOCK = ".checkpoints.lock"
NEWEST = 5
ONE_IN = 10


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One of the states.

    Args:
        folder: of its files.
        step: of the swarm.
        run: the run id it was written under.
        heldout_loss: in nats; nan where nothing was held out.
        saved_at: seconds since 1970.
        sha256: of its files.
    """

    folder: Path
    step: int
    run: str
    heldout_loss: float
    saved_at: float
    sha256: dict[str, str]

    def check(self) -> None:
        """ValueError unless all its files are what was written."""
        for name in HASHED:
            path = self.folder / name
            if not path.is_file():
                raise UserError(f"{path} is missing")
            if sha256_file(path) != self.sha256[name]:
                raise UserError(f"{path} is damaged: it is not what was written there")


def read_checkpoint(folder: Path) -> Checkpoint:
    """What checkpoint.json says; ValueError where it is not as this program writes it."""
    content = read_json(folder / META)
    try:
        loss = content["heldout_loss"]
        return Checkpoint(
            folder=folder,
            step=int(content["step"]),
            run=str(content["run"]),
            heldout_loss=math.nan if loss is None else float(loss),
            saved_at=float(content["saved_at"]),
            sha256={name: str(content["sha256"][name]) for name in HASHED},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / META} is no checkpoint's: {type(error).__name__} {error}") from None


def list_checkpoints(run_dir: Path, on_notice: OnNotice) -> list[Checkpoint]:
    """All that are kept, by step; those that cannot be read are told of and left out."""
    found = []
    for folder in (run_dir / FOLDER).glob("step-*"):
        try:
            found.append(read_checkpoint(folder))
        except (ValueError, OSError) as error:
            on_notice(f"left out: {error}")
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def steps_to_keep(steps: Iterable[int], every: int) -> set[int]:
    """Of checkpoints made every `every` steps: the newest NEWEST, of the older ones about one in ONE_IN."""
    ordered = sorted(steps)
    span = max(1, every) * ONE_IN
    first_of_span: dict[int, int] = {}
    for step in ordered:
        first_of_span.setdefault(step // span, step)
    return {*ordered[-NEWEST:], *first_of_span.values()}


class Checkpoints:
    """Where the donors of a machine write: one at a time, and none what another one has written.

    Args:
        run_dir: of the run.
        settings: of the run; its schedule's `checkpoint_every` is the distance.
        vqgan: folder that goes into the model folders, so that `generate` can use them.
        vqgan_fingerprint: of what made the codes.
        on_notice: told what could not be written.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: SwarmSettings,
        *,
        vqgan: Path | None = None,
        vqgan_fingerprint: str | None = None,
        on_notice: OnNotice,
    ):
        self.run_dir, self.settings, self.on_notice = run_dir, settings, on_notice
        self.vqgan, self.vqgan_fingerprint = vqgan, vqgan_fingerprint
        self.every = settings.recipe.schedule.checkpoint_every
        self.failed = 0
        """So often one could not be written."""
        self.root = run_dir / FOLDER
        with self.alone():
            for leftover in self.root.glob(".*.tmp"):
                shutil.rmtree(leftover)
        self.tried = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other donor writes; the kernel ends the turn of one that is killed."""
        with open(self.run_dir / LOCK, "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def restore(self, model: Dalle) -> tuple[int, list[Tensor]] | None:
        """Put the newest checkpoint that is sound into `model`; returns its step and the optimizer's statistics.

        Damaged ones are told of. ValueError where the checkpoints are of another run.
        """
        for checkpoint in reversed(list_checkpoints(self.run_dir, self.on_notice)):
            refuse_other_recipe(checkpoint, self.settings)
            try:
                statistics = load_checkpoint(checkpoint, model)
            except ValueError as error:
                self.on_notice(f"passed over: {error}")
                continue
            self.tried = checkpoint.step
            return checkpoint.step, statistics
        return None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be made at this step; a donor may have passed over the very one."""
        if step >= self.settings.total_steps:
            return self.tried < step
        return self.every > 0 and step // self.every > self.tried // self.every

    def save(self, step: int, model: Dalle, statistics: Sequence[Tensor], heldout_loss: float) -> bool:
        """Write a checkpoint and remove those that are not kept any more.

        A full disk is counted and said, and False is returned; what was written before stays.
        """
        self.tried = step
        place = self.root / f"step-{step:06d}"
        try:
            with self.alone():
                if not is_sound(place):
                    remove(place)
                    self.write(place, step, model, statistics, heldout_loss)
                self.prune()
        except (OSError, SafetensorError) as error:
            self.failed += 1
            self.on_notice(f"the checkpoint of step {step} could not be written ({error}); {self.what_then(step)}")
            return False
        return True

    def what_then(self, step: int) -> str:
        """After one that could not be written."""
        return "training goes on" if step < self.settings.total_steps else "make room, it is tried again"

    def write(self, place: Path, step: int, model: Dalle, statistics: Sequence[Tensor], heldout_loss: float) -> None:
        """All files into a hidden folder, then one rename."""
        with fresh_folder(place) as fresh:
            save_model(
                model,
                fresh / "model",
                tokenizer=self.run_dir / "tokenizer.json",
                vocabulary=placed_vocabulary(self.run_dir),
                vqgan=self.vqgan,
                vqgan_fingerprint=self.vqgan_fingerprint,
                caption_dropout=self.settings.recipe.data.caption_dropout,
            )
            save_weights({f"{number:05d}": tensor for number, tensor in enumerate(statistics)}, fresh / STATE)
            content = {
                "step": step,
                "run": self.settings.run_id,
                "heldout_loss": heldout_loss if math.isfinite(heldout_loss) else None,
                "saved_at": time.time(),
                "sha256": {name: sha256_file(fresh / name) for name in HASHED},
            }
            write_json(fresh / META, content)
            fresh.chmod(0o755)
            os.rename(fresh, place)
            sync_folder(self.root)

    def prune(self) -> None:
        """Remove what is not kept any more."""
        kept = list_checkpoints(self.run_dir, self.on_notice)
        wanted = steps_to_keep([checkpoint.step for checkpoint in kept], self.every)
        for checkpoint in kept:
            if checkpoint.step not in wanted:
                remove(checkpoint.folder)


def is_sound(folder: Path) -> bool:
    """Whether there is a checkpoint whose files are all what was written."""
    try:
        read_checkpoint(folder).check()
    except (ValueError, FileNotFoundError):
        return False
    return True


def remove(folder: Path) -> None:
    """Its name goes first: a folder that is half removed is no checkpoint."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}.tmp")
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def load_checkpoint(checkpoint: Checkpoint, model: Dalle) -> list[Tensor]:
    """Put a checkpoint's weights into `model`; returns the optimizer's statistics.

    Raises ValueError where it is damaged; `model` is not changed then.
    """
    checkpoint.check()
    saved = load_model(checkpoint.folder / "model")
    statistics = read_weights(checkpoint.folder / STATE)
    model.load_state_dict(saved.state_dict())
    return [statistics[name] for name in sorted(statistics)]


def refuse_other_recipe(checkpoint: Checkpoint, settings: SwarmSettings) -> None:
    """ValueError unless it is of this run, whatever name the run had then."""
    if recipe_of(checkpoint.run) != recipe_of(settings.run_id):
        raise UserError(f"{checkpoint.folder} is of another run, {checkpoint.run}; this one is {settings.run_id}")


def recipe_of(run_id: str) -> str:
    """The part of a run id that holds what all peers agree on, without the name."""
    return run_id.rpartition("-")[2]


def successor(name: str) -> str:
    """The name under which a run goes on after it was taken back: emoji, emoji-back1, emoji-back2, ...

    Names are part of the run id, so that peers which have the state that was given up cannot talk the others over.
    """
    match = re.fullmatch(r"(.*)-back([0-9]+)", name)
    return f"{match[1]}-back{int(match[2]) + 1}" if match else f"{name}-back1"


def first_name(name: str) -> str:
    """The name that a run was given, before it was ever taken back."""
    return re.sub(r"-back[0-9]+$", "", name)


def rollback(run_dir: Path, step: int, on_notice: OnNotice = silent) -> SwarmSettings:
    """Take the run back to its checkpoint of `step`; later ones are put aside, into checkpoints/given-up-NAME/.

    Returns the settings that it goes on with. Raises ValueError where there is no such checkpoint or it is damaged.
    """
    settings = read_settings(run_dir)
    kept = list_checkpoints(run_dir, on_notice)
    chosen = next((checkpoint for checkpoint in kept if checkpoint.step == step), None)
    if chosen is None:
        steps = ", ".join(str(checkpoint.step) for checkpoint in kept)
        raise UserError(f"{run_dir} has no checkpoint of step {step}; it has {steps or 'none'}")
    chosen.check()
    swarm = dataclasses.replace(settings.swarm, name=successor(settings.swarm.name))
    aside = run_dir / FOLDER / f"{GIVEN_UP}-{settings.swarm.name}"
    # These go first: killed in between, the same command finishes what was begun.
    for checkpoint in kept:
        if checkpoint.step > step:
            aside.mkdir(exist_ok=True)
            os.rename(checkpoint.folder, aside / checkpoint.folder.name)
    settings = dataclasses.replace(settings, swarm=swarm)
    write_settings(run_dir / SETTINGS, settings)
    return settings
