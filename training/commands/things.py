"""The command `dalle-lean train-things`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dalle_lean.terminal import Device, progress_bar, say


def train_things(
    data: Annotated[
        Path,
        typer.Argument(metavar="DATA", help="Folder whose metadata.jsonl names things, as train/ of `make data`."),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the run; the same command continues what it holds.")
    ],
    heldout: Annotated[
        Path | None, typer.Option(help="Folder of drawings by other hands to measure on; else nothing is measured.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all; 6000 unless told.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pictures in a step; 64 unless told.", min=2)] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; 2e-3 unless told.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the first weights and the order of the data; 0 unless told.", min=0)
    ] = None,
    picture_side: Annotated[
        int | None, typer.Option(help="Pixels of a side, at which things are cut out; 64 unless told.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16 (autocast); bf16 unless told.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop saved after so many minutes in all; the same command goes on.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a classifier on drawings whose listing names what they show; OUT/classifier is what `evaluate
    --classifier` asks which thing a model drew."""
    from dalle_lean.devices import pick_device
    from training.run.folder import run_folder
    from training.tokenizers.thing_learner import ThingRecipe
    from training.tokenizers.things import train_things as run

    chosen: dict[str, Any] = {
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "seed": seed,
        "picture_side": picture_side,
        "precision": precision,
    }
    recipe = ThingRecipe(**{name: value for name, value in chosen.items() if value is not None})
    with run_folder(out), progress_bar("training classifier", "pictures") as on_progress:
        end = run(
            data,
            out,
            recipe,
            heldout=heldout,
            device=str(pick_device(device)),
            max_minutes=max_minutes,
            on_progress=on_progress,
            on_notice=say,
        )
    say(end.end(recipe.steps, f"the classifier is in {out / 'classifier'}"))
