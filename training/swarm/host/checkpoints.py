"""Checkpoints of a run, each a folder that is complete or absent, and the rollback to one of them.

RUN_DIR/checkpoints/step-NNNNNN/ has model/ (a model folder), state.safetensors (the optimizer's statistics) and
checkpoint.json, with the step, the run id and the hashes of the files.
"""

import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from dalle_lean import Dalle, load_model, save_model
from dalle_lean.errors import UserError
from dalle_lean.io.files import fresh_folder, locked, read_json, sha256_file, sync_folder, write_json
from dalle_lean.io.model_folder import check_parts
from dalle_lean.io.safetensors_io import read_weights, save_weights
from dalle_lean.progress import OnNotice, silent
from training.run.folder import placed_vocabulary
from training.swarm.config import SWARM_TOML, SwarmSection, SwarmSettings, read_settings, write_settings
from training.swarm.host.host_config import HostConfig

FOLDER = "checkpoints"
META = "checkpoint.json"
STATE = "state.safetensors"
HASHED_FILES = ("model/config.json", "model/model.safetensors", STATE)
GIVEN_UP = "given-up"
ROLLBACK = "rollback.json"
"""In the run's folder while a rollback is under way: the step to go back to, and the name of the run that goes back."""
LOCK = ".checkpoints.lock"
KEPT_NEWEST = 5
KEPT_ONE_IN = 10


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One saved state.

    Args:
        step: of the schedule.
        run: the run id under which it was saved.
        heldout_loss: in nats; nan if not measured.
        saved_at: seconds since 1970.
        sha256: by file name.
    """

    folder: Path
    step: int
    run: str
    heldout_loss: float
    saved_at: float
    sha256: dict[str, str]

    def check(self) -> None:
        """ValueError unless all files match their hashes, in the model folder too."""
        for name in ("model/config.json", STATE):  # the former has the hashes of the model's other files
            path = self.folder / name
            if not path.is_file():
                raise UserError(f"{path} is missing")
            if sha256_file(path) != self.sha256[name]:
                raise UserError(f"{path} is damaged: its content has changed")
        check_parts(self.folder / "model")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read checkpoint.json; ValueError if it is malformed."""
    content = read_json(folder / META)
    try:
        loss = content["heldout_loss"]
        return Checkpoint(
            folder=folder,
            step=int(content["step"]),
            run=str(content["run"]),
            heldout_loss=math.nan if loss is None else float(loss),
            saved_at=float(content["saved_at"]),
            sha256={name: str(content["sha256"][name]) for name in HASHED_FILES},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / META} is malformed: {type(error).__name__} {error}") from None


def list_checkpoints(run_dir: Path, on_notice: OnNotice) -> list[Checkpoint]:
    """All checkpoints by step; unreadable ones are reported and skipped."""
    found = []
    for folder in (run_dir / FOLDER).glob("step-*"):
        try:
            found.append(read_checkpoint(folder))
        except (ValueError, OSError) as error:
            on_notice(f"skipped: {error}")
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest readable one; None before the first. Reports nothing: the donors report unreadable ones."""
    return next(reversed(list_checkpoints(run_dir, silent)), None)


def steps_to_keep(steps: Iterable[int], every: int) -> set[int]:
    """Of checkpoints at intervals of `every`, the newest KEPT_NEWEST and about one in KEPT_ONE_IN older ones."""
    ordered = sorted(steps)
    span = max(1, every) * KEPT_ONE_IN
    first_of_span: dict[int, int] = {}
    for step in ordered:
        first_of_span.setdefault(step // span, step)
    return {*ordered[-KEPT_NEWEST:], *first_of_span.values()}


class Checkpoints:
    """The checkpoints of a run, to which the donors of a machine write: one at a time, and each step once.

    The schedule's `checkpoint_every` is the interval in steps. The VQGAN that `host_config` names is copied into the
    model folders, so that `generate` can use them.
    """

    def __init__(self, run_dir: Path, settings: SwarmSettings, host_config: HostConfig, on_notice: OnNotice):
        self.run_dir, self.settings, self.host_config, self.on_notice = run_dir, settings, host_config, on_notice
        self.every = settings.recipe.schedule.checkpoint_every
        self.failed = 0
        """How many checkpoints could not be written."""
        self.root = run_dir / FOLDER
        with locked(self.run_dir / LOCK):
            for leftover in self.root.glob(".*.tmp"):
                shutil.rmtree(leftover)
        self.last_attempt = 0

    def restore(self, model: Dalle) -> tuple[int, list[Tensor]] | None:
        """Load the newest intact checkpoint into `model`; returns its step and the optimizer's statistics.

        Damaged ones are reported. ValueError if the checkpoints belong to another run, or none can be loaded.
        """
        for checkpoint in reversed(list_checkpoints(self.run_dir, self.on_notice)):
            run_id = self.settings.run_id
            # After the name, which a rollback changes, a run id has a hash of what all peers must agree on.
            if checkpoint.run.rpartition("-")[2] != run_id.rpartition("-")[2]:
                raise UserError(f"{checkpoint.folder} belongs to another run, {checkpoint.run}; this one is {run_id}")
            try:
                statistics = load_checkpoint(checkpoint, model)
            except ValueError as error:
                self.on_notice(f"skipped: {error}")
                continue
            self.last_attempt = checkpoint.step
            return checkpoint.step, statistics
        if any(self.root.glob("step-*")):  # a run must not begin again unasked, least of all for want of memory
            raise UserError(
                f"none of the checkpoints in {self.root} can be loaded; see above why, or move them away: the run then "
                "goes on from its trainers' state, or begins again if there is none"
            )
        return None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due at this step; a donor may miss the exact multiple."""
        if step >= self.settings.total_steps:
            return self.last_attempt < step
        return self.every > 0 and step // self.every > self.last_attempt // self.every

    def save(self, step: int, model: Dalle, statistics: Sequence[Tensor], heldout_loss: float) -> bool:
        """Write a checkpoint and remove old ones; returns whether it was written.

        A failure, such as a full disk, is counted and reported; earlier checkpoints stay.
        """
        self.last_attempt = step
        try:
            with locked(self.run_dir / LOCK):
                if not is_intact(self.folder(step)):
                    self.write(step, model, statistics, heldout_loss)
                self.prune()
        except (OSError, SafetensorError, ValueError) as error:  # a full disk; a VQGAN folder that is gone
            self.failed += 1
            is_last = step >= self.settings.total_steps
            advice = "free some space, it" if isinstance(error, OSError) else "it"
            consequence = f"{advice} will be retried" if is_last else "training goes on"
            self.on_notice(f"the checkpoint of step {step} could not be written ({error}); {consequence}")
            return False
        return True

    def record_loss(self, step: int, heldout_loss: float) -> None:
        """Add the held-out loss, in nats, to a checkpoint that was saved without it; nan adds nothing."""
        path = self.folder(step) / META
        with locked(self.run_dir / LOCK):
            if math.isfinite(heldout_loss) and path.exists():
                write_json(path, {**read_json(path), "heldout_loss": heldout_loss})

    def begin_with(self, model: Dalle) -> None:
        """Write the run's first checkpoint, unless it has an intact one."""
        with locked(self.run_dir / LOCK):
            if not has_intact_checkpoint(self.run_dir):
                self.write(self.settings.first_epoch * self.settings.steps_per_epoch, model, [], math.nan)

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def write(self, step: int, model: Dalle, statistics: Sequence[Tensor], heldout_loss: float) -> None:
        """Write all files into a hidden folder, then rename it. `statistics` may be empty, for a new optimizer."""
        host, folder = self.host_config, self.folder(step)
        remove(folder)
        with fresh_folder(folder) as fresh:
            save_model(
                model,
                fresh / "model",
                tokenizer=self.run_dir / "tokenizer.json",
                vocabulary=placed_vocabulary(self.run_dir),
                vqgan=None if host.vqgan is None else Path(host.vqgan),
                vqgan_fingerprint=host.vqgan_fingerprint,
                caption_dropout=self.settings.recipe.data.caption_dropout,
            )
            save_weights({f"{number:05d}": tensor for number, tensor in enumerate(statistics)}, fresh / STATE)
            content = {
                "step": step,
                "run": self.settings.run_id,
                "heldout_loss": heldout_loss if math.isfinite(heldout_loss) else None,
                "saved_at": time.time(),
                "sha256": {name: sha256_file(fresh / name) for name in HASHED_FILES},
            }
            write_json(fresh / META, content)
            os.rename(fresh, folder)
            sync_folder(self.root)

    def prune(self) -> None:
        kept = list_checkpoints(self.run_dir, self.on_notice)
        wanted = steps_to_keep([checkpoint.step for checkpoint in kept], self.every)
        for checkpoint in kept:
            if checkpoint.step not in wanted:
                remove(checkpoint.folder)


def is_intact(folder: Path) -> bool:
    try:
        read_checkpoint(folder).check()
    except (ValueError, FileNotFoundError):
        return False
    return True


def has_intact_checkpoint(run_dir: Path) -> bool:
    """Whether the run has a checkpoint to start from."""
    return any(is_intact(checkpoint.folder) for checkpoint in list_checkpoints(run_dir, silent))


def remove(folder: Path) -> None:
    """Remove a folder. It is renamed first, so that a half-deleted folder is not a checkpoint."""
    if folder.exists():
        hidden = folder.with_name(f".{folder.name}.tmp")
        os.rename(folder, hidden)
        shutil.rmtree(hidden)


def load_checkpoint(checkpoint: Checkpoint, model: Dalle) -> list[Tensor]:
    """Load a checkpoint's weights into `model`; returns the optimizer's statistics.

    Raises ValueError, with `model` unchanged, if it is damaged.
    """
    checkpoint.check()
    saved = load_model(checkpoint.folder / "model")
    statistics = read_weights(checkpoint.folder / STATE)
    model.load_state_dict(saved.state_dict())
    return [statistics[name] for name in sorted(statistics)]


def successor(swarm: SwarmSection) -> str:
    """The name of a run after a rollback: emoji, emoji-back1, emoji-back2, ...

    The name is part of the run id, so peers that still have the discarded state no longer take part.
    """
    return f"{swarm.first_name}-back{swarm.rollbacks + 1}"


def begin_rollback(run_dir: Path, step: int) -> None:
    """Note that the run goes back to its checkpoint of `step`; from here on, a kill leaves it to `finish_rollback`."""
    write_json(run_dir / ROLLBACK, {"step": step, "name": read_settings(run_dir).swarm.name})


def finish_rollback(run_dir: Path, on_notice: OnNotice) -> None:
    """Complete a rollback that was interrupted, if there is one; ValueError as `rollback`."""
    path = run_dir / ROLLBACK
    if not path.exists():
        return
    try:
        match read_json(path):
            case {"step": int(step), "name": str(name)}:
                pass
            case _:
                raise UserError(f"{path} is malformed")
    except UserError as error:
        raise UserError(f"{error}; choose a step with dalle-lean rollback") from None
    if name != read_settings(run_dir).swarm.name:  # it was complete but for this file
        path.unlink()
        return
    on_notice(f"the rollback to step {step} was interrupted; completing it")
    try:
        settings = rollback(run_dir, step, on_notice)
    except UserError as error:
        raise UserError(f"{error}; choose another step with dalle-lean rollback") from None
    on_notice(f"the run continues from step {step} as {settings.swarm.name}")


def rollback(run_dir: Path, step: int, on_notice: OnNotice = silent) -> SwarmSettings:
    """Roll a run back to its checkpoint of `step`; later ones are moved to checkpoints/given-up-NAME/.

    Returns the new settings. Raises ValueError if there is no such checkpoint or it is damaged.
    """
    settings = read_settings(run_dir)
    kept = list_checkpoints(run_dir, on_notice)
    chosen = next((checkpoint for checkpoint in kept if checkpoint.step == step), None)
    if chosen is None:
        steps = ", ".join(str(checkpoint.step) for checkpoint in kept)
        raise UserError(f"{run_dir} has no checkpoint of step {step}; it has {steps or 'none'}")
    chosen.check()
    begin_rollback(run_dir, step)
    swarm = dataclasses.replace(settings.swarm, name=successor(settings.swarm))
    root = run_dir / FOLDER
    aside = root / f"{GIVEN_UP}-{settings.swarm.name}"
    for checkpoint in kept:
        if checkpoint.step > step:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / checkpoint.folder.name, ignore_errors=True)  # of a rollback that was killed
            os.rename(checkpoint.folder, aside / checkpoint.folder.name)
            sync_folder(aside)
    sync_folder(root)
    settings = dataclasses.replace(settings, swarm=swarm)
    write_settings(run_dir / SWARM_TOML, settings)  # after the moves: `finish_rollback` takes its name for their end
    (run_dir / ROLLBACK).unlink()
    return settings
