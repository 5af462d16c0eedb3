"""`dalle-lean convert`: published or older checkpoints <-> model folders."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.errors import UserError


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A published checkpoint file, or (with --to) a model folder.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write, or (with --to) the file.")],
    config: Annotated[
        Path | None,
        typer.Option(
            help="DALL-E: JSON of DalleConfig fields (default: the paper's). VQGAN: its published config.yaml."
        ),
    ] = None,
    kind: Annotated[str, typer.Option(help="What SOURCE is: dalle or vqgan.")] = "dalle",
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json to put into the model folder.")] = None,
    vqgan: Annotated[Path | None, typer.Option(help="VQGAN folder to put into the model folder.")] = None,
    to: Annotated[
        str | None, typer.Option(help="Go back to a published form: fork (the run's names) or 1.4 (dalle-pytorch).")
    ] = None,
    prefix: Annotated[str, typer.Option(help="With --to: put in front of every key; the run's files have model.")] = "",
) -> None:
    """Published checkpoints <-> model folders.

    Published files are read with weights-only loading; every missing, unknown or misshapen key is refused by name.
    """
    from dalle_lean.convert import files
    from dalle_lean.terminal import say

    if kind not in ("dalle", "vqgan"):
        raise UserError(f"--kind {kind}: must be dalle or vqgan")
    if to is not None and kind == "vqgan":
        raise UserError("--kind vqgan --to: only a DALL-E goes back to a published form")
    if to is not None:
        files.export_dalle(source, out, to, prefix)
    elif kind == "vqgan":
        files.import_vqgan(source, out, config)
    else:
        files.import_dalle(source, out, config, tokenizer=tokenizer, vqgan=vqgan)
    say(f"wrote {out}")
