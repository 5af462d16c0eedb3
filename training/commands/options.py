"""Options that several commands share, and what the trainings on pictures do with them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dalle_lean.errors import UserError

Code = Annotated[str | None, typer.Option(help="Invitation code, if the run requires one; needed only once.")]
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


def train_run(
    run_class: Any, data: Path, out: Path, recipe: Any, noun: str, result: Path, device: str, **inputs: Any
) -> None:
    """Train a `noun`, which goes to `result`, in the folder `out`, with a progress bar, and say how that ended.

    Other arguments are those of `training.run.loop.train_on_pictures`.
    """
    from dalle_lean.devices import pick_device
    from dalle_lean.terminal import progress_bar, say
    from training.run.folder import run_folder
    from training.run.loop import train_on_pictures

    with run_folder(out), progress_bar(f"training {noun}", "pictures") as on_progress:
        inputs |= {"device": str(pick_device(device)), "on_progress": on_progress}
        end = train_on_pictures(run_class, data, out, recipe, **inputs)
    say(end.end(recipe.steps, f"the {noun} is in {result}"))
