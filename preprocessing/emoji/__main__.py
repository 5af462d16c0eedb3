"""`python -m preprocessing.emoji OUT`: build the emoji picture set from npm packages. `make data` runs it."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import echo, explain, notice, progress_bar
from preprocessing.emoji.build import build
from preprocessing.emoji.plan import COPIES
from preprocessing.emoji.sets import BUNDLED_SET

ALL_COPIES = ",".join(f"{kind}={number}" for kind, number in COPIES.items())


def command(
    out: Annotated[Path, typer.Argument(help="Folder to write: train, heldout, heldout.json and LICENSES.")],
    packages: Annotated[Path, typer.Option(help="npm's node_modules with the emoji packages.")] = Path(
        "data/npm/node_modules"
    ),
    sets: Annotated[str, typer.Option(help="Which of iconify's emoji sets, with commas between.")] = BUNDLED_SET,
    only_pairs_held_out: Annotated[
        bool, typer.Option("--only-pairs-held-out", help="Training sees every thing, drawing and colour: for a judge.")
    ] = False,
    side: Annotated[int, typer.Option(help="Width and height of the pictures, in pixels.")] = 128,
    seed: Annotated[int, typer.Option(help="The same seed writes the same bytes.")] = 0,
    copies: Annotated[
        str, typer.Option(help="Training pictures of each kind that a thing has; kinds left out have none.")
    ] = ALL_COPIES,
    fillers: Annotated[
        float,
        typer.Option(help="Share of the training captions with words that the picture does not show.", min=0, max=1),
    ] = 0.0,
    processes: Annotated[int, typer.Option(help="Processes that draw.", min=1)] = os.cpu_count() or 1,
) -> None:
    """Draw the emoji picture set: things alone, on coloured grounds, painted, in pairs, counted."""
    try:
        with progress_bar("drawing", "pictures") as on_progress:
            counts = build(
                packages,
                out,
                side=side,
                seed=seed,
                processes=processes,
                sets=sets.split(","),
                only_pairs_held_out=only_pairs_held_out,
                copies=read_copies(copies),
                fillers=fillers,
                on_progress=on_progress,
            )
    except Exception as failure:
        sys.exit(explain(failure))
    except KeyboardInterrupt:
        notice(f"interrupted; {out} is as it was")
        sys.exit(130)
    for part, numbers in counts.items():
        echo(f"{part}: " + ", ".join(f"{number} {what}" for what, number in numbers.items()))


def read_copies(text: str) -> dict[str, int]:
    """Numbers such as "scene=40,pair=14" by kind, 0 for the kinds left out; UserError if it is anything else."""
    copies: dict[str, int] = {}
    for part in text.split(","):
        kind, _, number = part.strip().partition("=")
        if kind not in COPIES or kind in copies or not number.isdecimal():
            kinds = ", ".join(COPIES)
            raise UserError(f"--copies {text!r}: {part!r} must be one of {kinds}, once, with a number, like pair=14")
        copies[kind] = int(number)
    if not any(copies.values()):
        raise UserError(f"--copies {text!r}: nothing to draw; give a kind a number of at least 1, like pair=14")
    return dict.fromkeys(COPIES, 0) | copies


if __name__ == "__main__":
    typer.run(command)
