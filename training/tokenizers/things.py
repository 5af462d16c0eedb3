"""The run that trains a classifier of things on drawings whose listing names what each shows.

OUT gets classifier/ (a classifier folder), checkpoint/, metrics.jsonl and tensorboard/.
"""

import math
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.thing_classifier import READ_SIDE, ThingClassifier, picture_of_thing
from dalle_lean.progress import OnProgress
from training.data.image_text import ImageTextPairs, Unusable, digest, read_captioned, read_picture
from training.run.checkpoint import load_checkpoint
from training.run.graceful_stop import TimeLimit
from training.run.metrics import MetricsLog
from training.run.progress import MeasuredProgress, OnNotice
from training.tokenizers.loop import take_steps, what_decides
from training.tokenizers.thing_learner import ThingLearner, ThingRecipe


def train_things(
    data: Path,
    out: Path,
    recipe: ThingRecipe,
    *,
    heldout: Path | None = None,
    device: str = "cpu",
    max_minutes: float | None = None,
    on_progress: OnProgress | None = None,
    on_notice: OnNotice | None = None,
) -> MeasuredProgress:
    """Train on the lines of `data` that name one thing, or continue the run that `out` holds exactly where its last
    checkpoint stood.

    Args:
        heldout: a folder to measure on: best drawings of other sets. Without it nothing is measured.
        max_minutes: after which the run stops where it is, with its weights so far in place; the time to read counts.
            The same call goes on.
        on_progress: called with (done, total, note): pictures read, then pictures trained on.
        on_notice: called upon Ctrl+C and SIGTERM.

    Raises:
        TrainingDiverged: see ThingRecipe.max_skipped_in_row; the last checkpoint stays as it was.
        ValueError: data or the run in `out` do not fit.
        KeyboardInterrupt, Terminated: on Ctrl+C or SIGTERM, once the step is finished and saved.
    """
    limit = TimeLimit(max_minutes)
    train_set = read_things(data, recipe.picture_side, on_progress)
    names = sorted({*train_set.captions})
    if len(names) < 2:
        raise UserError(f"{data} shows only {names[0]!r}; at least two things are needed to tell them apart")
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        classifier = ThingClassifier(names, recipe.picture_side, device)
    known = None if heldout is None else known_things(heldout, classifier, recipe.heldout_pictures, on_progress)
    learner = ThingLearner(recipe, classifier, train_set.pixels, classifier.rows(train_set.captions))
    run = {
        "recipe": what_decides(recipe),
        "training pictures": digest(train_set),
    }
    saved = load_checkpoint(out, model=classifier.model, optimizer=learner.optimizer, run=run)
    among = {"right_thing_first": len(names)}
    progress = MeasuredProgress(**{**(saved or {"unusable": dict(train_set.skipped)}), "among": among})

    def measure_heldout(metrics: MetricsLog) -> None:
        if known is not None:
            hits = classifier.scores_of_pixels(known.pixels[:]).argmax(dim=1).cpu() == classifier.rows(known.captions)
            progress.measured = {"right_thing_first": hits.float().mean().item()}
            metrics.write(progress.step, **progress.measured)

    take_steps(
        out,
        recipe,
        learner.batches(progress.step),
        learner.step,
        measure=measure_heldout,
        finish=lambda metrics: classifier.save(out / "classifier"),
        progress=progress,
        model=classifier.model,
        optimizer=learner.optimizer,
        run=run,
        limit=limit,
        on_progress=on_progress,
        on_notice=on_notice,
    )
    return progress


def read_things(folder: Path, side: int, on_progress: OnProgress | None = None) -> ImageTextPairs:
    """The pictures of a folder that show one thing each, cut out at this side; as captions the names of the things."""
    return read_captioned(folder, side, on_progress, label_of=only_thing, read=read_thing)


def only_thing(entry: dict[str, Any]) -> str:
    """The one thing that a line of a listing names."""
    things = entry.get("things")
    if not isinstance(things, list) or not all(isinstance(thing, str) and thing.strip() for thing in things):
        raise Unusable("no things named")
    if len(things) != 1:
        raise Unusable("not one thing alone")
    thing: str = things[0].strip()
    if not thing.isprintable():
        raise Unusable("a name that cannot be printed")
    return thing


def read_thing(folder: Path, name: str, side: int) -> Tensor:
    """The thing that stands on the ground of one picture: uint8 [3, side, side]."""
    pixels = read_picture(folder, name, READ_SIDE).permute(1, 2, 0).numpy()
    return picture_of_thing(Image.fromarray(pixels), side)


def known_things(
    folder: Path, classifier: ThingClassifier, most: int, on_progress: OnProgress | None = None
) -> ImageTextPairs:
    """Evenly from a folder, at most so many pictures of things that the classifier knows; ValueError where there are
    none."""
    found = read_things(folder, classifier.picture_side, on_progress)
    rows = [row for row, thing in enumerate(found.captions) if thing in classifier.row_of]
    if not rows:
        raise UserError(f"{folder} shows none of the {len(classifier.things)} things that are learnt")
    return found.take(rows[:: math.ceil(len(rows) / most)])
