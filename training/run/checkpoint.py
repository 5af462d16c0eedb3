"""Checkpoints: everything a killed run needs to resume exactly, in one file that is replaced atomically; and whether it
belongs to the run that a command asks for, or else what differs, in words."""

import json
import logging
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.optim.lamb import is_sharded
from training.run.processes import ALONE, Processes
from training.run.recipe import ScheduleRecipe

FORMAT = "dalle_lean_training/1"
NAME = "checkpoint/state.pt"
MOST_NAMED = 6
OTHER_INPUTS = {
    "dataset.json": "DATA holds other shards",
    "pictures": "pictures were added, removed or changed",
    "training pictures": "pictures or captions were added, removed or changed",
    "held-out shards": "--heldout names other shards",
    "first weights": "--init names another model",
    "init": "--init names another CLIP",
    "init_from": "the VQGAN to start from is another one",
    "tokenizer": "--tokenizer names another one",
    "vqgan": "--vqgan names another one",
}
logger = logging.getLogger(__name__)


def save_checkpoint(
    out: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    run: dict[str, Any],
    scales: BranchScales | None = None,
    processes: Processes = ALONE,
) -> None:
    """Write weights, optimizer state, gradient scales, random state, `progress` (counters and measurements) and `run`
    (settings and data, which must stay the same).

    All processes call it, and the first one writes; the file does not depend on their number.
    """
    weights = full_tensors(model.state_dict(), keep=processes.first)
    optimizer_state = full_tensors(optimizer.state_dict(), keep=processes.first)
    if processes.first:
        state = {
            "format": FORMAT,
            "model": weights,
            "optimizer": optimizer_state,
            "scales": None if scales is None else scales.state_dict(),
            "random": {
                "cpu": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            },
            "progress": progress,
            "run": json.dumps(run),
        }
        with atomic_write(out / NAME) as temporary:
            torch.save(state, temporary)
    processes.wait()


def has_checkpoint(out: Path) -> bool:
    return (out / NAME).exists()


def load_checkpoint(
    out: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: dict[str, Any],
    scales: BranchScales | None = None,
    defaults: Mapping[str, dict[str, Any]] | None = None,
    schedule: ScheduleRecipe | None = None,
) -> dict[str, Any] | None:
    """Restore what `save_checkpoint` wrote and return its `progress`; None if there is no checkpoint yet.

    Args:
        scales: unchanged if the checkpoint has none.
        defaults: for each part of `run`, the values of settings that an older checkpoint may lack.
        schedule: under which the run goes on; it must leave something to do, unless it is the run's own.

    Raises:
        ValueError: the file is damaged, or belongs to another run; the message names what differs.
    """
    path = out / NAME
    if not has_checkpoint(out):
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path} is damaged ({reason}); remove it to start the run over") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program; name another folder")
    saved = json.loads(state["run"])
    if saved.get("optimizer", {}).pop("delayed", False):  # an option of earlier versions
        raise UserError(
            f"{out} holds a run with [optimizer] delayed = true, an option that is gone: leave it out, and start a new "
            f"run from its model with --init {out / 'model'}"
        )
    for name, settings in json.loads(json.dumps(defaults or {})).items():
        if name in saved:
            saved[name] = {**settings, **saved[name]}
    refuse_other_run(out, saved, json.loads(json.dumps(run)))
    if schedule is not None:
        check_schedule(out, state["progress"]["step"], saved.get("schedule"), schedule)
    weights = model.state_dict()
    model.load_state_dict({name: sharded_like(value, weights.get(name)) for name, value in state["model"].items()})
    optimizer.load_state_dict(sharded_optimizer_state(state["optimizer"], optimizer.param_groups))
    if scales is not None and state.get("scales") is not None:
        scales.load_state_dict(state["scales"])
    torch.set_rng_state(state["random"]["cpu"])
    # Devices missing here are ignored.
    for device, generator in enumerate(state["random"]["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, device)
    progress: dict[str, Any] = state["progress"]
    return progress


def refuse_other_run(out: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """UserError that names what differs between the settings and inputs of the run in `out` and those given."""
    if any(isinstance(value, dict) and name not in saved for name, value in now.items()):
        raise UserError(f"{out} holds a run of another kind; name another folder")
    differing = [name for name, value in now.items() if saved.get(name) != value]
    words = [OTHER_INPUTS.get(name, f"{name} differs") for name in differing if not isinstance(now[name], dict)]
    for name in differing:
        if isinstance(now[name], dict):
            words += changed_settings(saved[name], now[name])
    if words:
        more = len(words) - MOST_NAMED
        listed = "; ".join(words[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        given = "--config, options" if "model" in now else "options"
        raise UserError(
            f"{out} holds another run ({listed}): give the {given} and data that it was begun with, or name another "
            "folder"
        )


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A phrase for each setting that differs, also in nested sections."""
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from changed_settings(old, new)
        elif old != new:
            yield f"{key} was {said(old)}, now {said(new)}"


def said(value: Any) -> str:
    return "not set" if value is None else str(value)


def check_schedule(out: Path, step: int, saved: Mapping[str, Any] | None, now: ScheduleRecipe) -> None:
    """UserError if the run in `out`, now at `step`, has nothing to do under the schedule `now`, which is not its own;
    says which settings change where it goes on.

    saved: the schedule that the run had; None if its checkpoint is of a version that did not keep it.
    """
    before, wanted = saved or {}, json.loads(json.dumps(asdict(now)))
    names = {"total_steps": "--steps", "peak_lr": "--lr"}
    changed = [name for name in before if before[name] != wanted[name]]
    if "total_steps" in changed:  # the warm-ups and the hold follow from it
        changed = [name for name in changed if name in names]
    listed = ", ".join(f"{names.get(name, name)} was {before[name]}, now {wanted[name]}" for name in changed)
    if step > now.total_steps or (step == now.total_steps and changed):
        raise UserError(
            f"{out} holds a run at step {step}, and this command asks for {now.total_steps}"
            f"{f' ({listed})' if listed else ''}: give more --steps, or train its model further in another folder with "
            f"--init {out / 'model'}"
        )
    if changed:
        logger.info(f"From step {step} on with another schedule: {listed}.")


def full_tensors(value: Any, keep: bool) -> Any:
    """A state dict with its sharded tensors gathered on the CPU; all processes call it, and those without `keep` get
    None in their place."""
    if isinstance(value, dict):
        return {name: full_tensors(part, keep) for name, part in value.items()}
    if not is_sharded(value):
        return value
    tensor = value.full_tensor()
    return tensor.cpu() if keep else None


def sharded_like(value: Any, like: Any) -> Any:
    """Shard a whole tensor like `like`, if that is sharded and has its shape; return anything else unchanged."""
    if not (is_sharded(like) and isinstance(value, Tensor) and value.shape == like.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor: nothing is sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def sharded_optimizer_state(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Shard an optimizer's state dict like the parameters of its groups."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    sharded = {
        number: {name: sharded_like(value, parameters[number]) for name, value in statistics.items()}
        for number, statistics in state["state"].items()
        if number < len(parameters)
    }
    return {**state, "state": {**state["state"], **sharded}}
