"""The command `dalle-lean train-things`."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.terminal import Device
from training.commands.options import LearningRate, MaxMinutes, Out, Precision, Seed, Steps, recipe_of, train_run
from training.things.recipe import ThingRecipe


def train_things(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="Folder whose metadata.jsonl names things, such as train/ of `make data`."),
    ],
    out: Out,
    heldout: Annotated[
        Path | None,
        typer.Option(
            help="Folder of drawings, ideally in other styles, to measure on. [default: none]", show_default=False
        ),
    ] = None,
    steps: Steps = ThingRecipe.steps,
    batch_size: Annotated[int, typer.Option(help="Pictures per step.", min=2)] = ThingRecipe.batch_size,
    lr: LearningRate = ThingRecipe.lr,
    seed: Seed = ThingRecipe.seed,
    picture_side: Annotated[int, typer.Option(help="Side of the cropped things in pixels.")] = ThingRecipe.picture_side,
    precision: Precision = ThingRecipe.precision,
    max_minutes: MaxMinutes = None,
    device: Device = "auto",
) -> None:
    """Train a classifier on drawings whose listing names what they show; `evaluate` judges things by OUT/classifier."""
    options = locals()
    from training.things.run import ThingRun

    recipe = recipe_of(ThingRecipe, options)
    train_run(ThingRun, data, out, recipe, "classifier", device, max_minutes, heldout=heldout)
