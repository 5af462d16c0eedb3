"""Options that several commands share, and what the trainings on pictures do with them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dalle_lean.errors import UserError
from training.run.loop_settings import PictureRecipe

R = TypeVar("R", bound=PictureRecipe)
Code = Annotated[str | None, typer.Option(help="Invitation code, if the run requires one; needed only once.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run hosted on this machine.")]
DEFAULT_PAGE_ADDRESS = "127.0.0.1:7870"
PageAddress = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Address that --page listens on; 0.0.0.0:PORT admits other machines.")
]
PromptPage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Prompt page (`dalle-lean demo`) to link from the run's page; '' for none. [default: one for the newest "
        "checkpoint, under /draw/, if the hosting machine serves the page without --export]",
    ),
]
Export = Annotated[
    Path | None, typer.Option(help="Write the run's page into this folder once a minute, for any web server.")
]


def check_page_options(page: bool, page_address: str, export: Path | None, prompt_page: str | None) -> None:
    """UserError for an option of a page that is neither served nor written."""
    if page_address != DEFAULT_PAGE_ADDRESS and not page:
        raise UserError(f"--page-address {page_address} is where --page listens: add --page")
    if prompt_page is not None and not page and export is None:
        raise UserError("--prompt-page is for the run's page: add --page or --export")


Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the run; the same command continues it.")]
TokenizerFile = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help="tokenizer.json, or a hub id. [default: that of --init, or trained on the captions]"
    ),
]
Steps = Annotated[int, typer.Option(help="Total optimizer steps.", min=1)]
LearningRate = Annotated[float, typer.Option(help="Peak learning rate.")]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights and the order of the data.", min=0)]
Precision = Annotated[str, typer.Option(help="fp32 or bf16 (autocast).")]
MaxMinutes = Annotated[
    float | None, typer.Option(help="Stop and save after this many minutes; the same command continues.")
]


def recipe_of(kind: type[R], options: Mapping[str, Any], **others: Any) -> R:
    """The recipe with a command's options of the same names, and with `others`."""
    names = {spec.name for spec in dataclasses.fields(kind)}
    return kind(**{**{name: value for name, value in options.items() if name in names}, **others})


def train_run(
    run_class: Any,
    data: Path,
    out: Path,
    recipe: PictureRecipe,
    noun: str,
    device: str,
    max_minutes: float | None,
    **inputs: Any,
) -> None:
    """Train a `noun` on the pictures in `data`, or continue the run that `out` holds, with a progress bar, and say how
    that ended.

    Args:
        run_class: the kind of run; `inputs` are its other arguments.
        max_minutes: time limit, reading the pictures included; the run is saved then, with a result of its current
            weights.
    """
    from dalle_lean.devices import pick_device
    from dalle_lean.terminal import echo, progress_bar
    from training.run.folder import run_folder
    from training.run.graceful_stop import TimeLimit

    with run_folder(out), progress_bar(f"training {noun}", "pictures") as on_progress:
        limit = TimeLimit(max_minutes)
        run = run_class(data, out, recipe, device=str(pick_device(device)), on_progress=on_progress, **inputs)
        progress = run.run(on_progress, limit)
    echo(progress.last_line(recipe.steps, f"the {noun} is in {run.result.parent}"))
