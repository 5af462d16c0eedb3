"""Checkpoints: all that a killed run needs to resume exactly, in one file that is replaced atomically."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.optim.lamb_delayed import DelayedLamb
from training.run.processes import ALONE, Processes
from training.run.spread import spread_as, spread_statistics, whole

FORMAT = "dalle_lean_training/1"
NAME = "checkpoint/state.pt"


def save_checkpoint(
    out: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | DelayedLamb,
    progress: dict[str, Any],
    run: dict[str, Any],
    scales: BranchScales | None = None,
    processes: Processes = ALONE,
) -> None:
    """Write weights, optimizer state, gradient scales, random state, `progress` (numbers that move) and `run` (what
    the run is).

    All processes call it and the first one writes; the file is the same for any number of them.
    """
    weights = whole(model.state_dict(), keep=processes.first)
    statistics = whole(optimizer.state_dict(), keep=processes.first)
    if not processes.first:
        processes.wait()
        return
    state = {
        "format": FORMAT,
        "model": weights,
        "optimizer": statistics,
        "scales": None if scales is None else scales.state_dict(),
        "random": random_state(),
        "progress": progress,
        "run": json.dumps(run),
    }
    with atomic_write(out / NAME) as temporary:
        torch.save(state, temporary)
    processes.wait()


def has_checkpoint(out: Path) -> bool:
    """Whether the folder holds a run that was saved at least once."""
    return (out / NAME).exists()


def load_checkpoint(
    out: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | DelayedLamb,
    run: dict[str, Any],
    scales: BranchScales | None = None,
    defaults: Mapping[str, dict[str, Any]] | None = None,
) -> dict[str, Any] | None:
    """Restore what `save_checkpoint` wrote and return its `progress`; None where there is no checkpoint yet.

    Args:
        scales: stay as they are where the checkpoint has none.
        defaults: settings by the name of their part of `run`: their value in a checkpoint too old to know them.

    Raises:
        ValueError: a damaged file, or a checkpoint of another run; names what differs.
    """
    path = out / NAME
    if not has_checkpoint(out):
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{path} is damaged ({reason}); remove it to start the run again") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of this program")
    saved = json.loads(state["run"])
    for name, settings in json.loads(json.dumps(defaults or {})).items():
        saved[name] = {**settings, **saved[name]}
    for name, value in json.loads(json.dumps(run)).items():
        if saved.get(name) != value:
            raise UserError(
                f"{out} holds another run: its {name} is {saved.get(name)}, now {value}; give another folder"
            )
    weights = model.state_dict()
    model.load_state_dict({name: spread_as(value, weights.get(name)) for name, value in state["model"].items()})
    optimizer.load_state_dict(spread_statistics(state["optimizer"], optimizer.param_groups))
    if scales is not None and state.get("scales") is not None:
        scales.load_state_dict(state["scales"])
    set_random_state(state["random"])
    progress: dict[str, Any] = state["progress"]
    return progress


def random_state() -> dict[str, Any]:
    """The state of torch's generators."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of `random_state`; generators of devices that are not here are left out."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available():
        for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(generator, device)
