"""`python -m training.gpu_kit OUT`: write the folder that travels to a lent GPU. `make gpu-kit` runs it."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.terminal import explain, say
from training.gpu_kit.pack import install, write_kit

ROOT = Path(__file__).parents[2]


def command(
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not be there yet.")],
    drawings: Annotated[
        Path, typer.Option(help="Emoji packages, as `python -m preprocessing.emoji.slim` writes them.")
    ],
    site: Annotated[Path | None, typer.Option(help="Packages installed already, instead of with pip.")] = None,
    preset: Annotated[int, typer.Option(help="Of xz: higher is smaller and slower.", min=0, max=9)] = 6,
) -> None:
    """Pack sources, packages and drawings for a machine with Python 3.12, torch and no network."""
    try:
        with tempfile.TemporaryDirectory() as scratch:
            if site is None:
                site = Path(scratch) / "site"
                install(site, ROOT / "constraints.txt")
            sizes = write_kit(out, sources=ROOT, site=site, drawings=drawings, preset=preset)
    except Exception as failure:
        sys.exit(explain(failure))
    for name, size in sizes.items():
        say(f"{size / 1e6:6.1f} MB  {name}")
    say(f"{sum(sizes.values()) / 1e6:6.1f} MB  in all, in {out}")


if __name__ == "__main__":
    typer.run(command)
