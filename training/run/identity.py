"""Whether a checkpoint belongs to the run that a command asks for; if not, what differs, in words."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from training.run.recipe import ScheduleRecipe

MOST_NAMED = 6
logger = logging.getLogger(__name__)
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
