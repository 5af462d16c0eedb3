"""`dalle-lean convert`: published or older checkpoints <-> model folders."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.errors import UserError


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A published file; with --to a model folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; with --to the file.")],
    config: Annotated[
        Path | None,
        typer.Option(help="DALL-E: JSON of DalleConfig fields (default: the paper's). VQGAN: its config.yaml."),
    ] = None,
    kind: Annotated[str, typer.Option(help="What SOURCE is: dalle, vqgan or clip.")] = "dalle",
    architecture: Annotated[
        str, typer.Option(help="CLIP: open_clip's name of the architecture; for OpenAI's weights with -quickgelu.")
    ] = "ViT-B-32-quickgelu",
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, or a hub id, for the model folder.")] = None,
    vqgan: Annotated[Path | None, typer.Option(help="VQGAN folder to put into the model folder.")] = None,
    to: Annotated[
        str | None,
        typer.Option(help="Write published key names: fork (the paper's run) or 1.4 (dalle-pytorch 1.4.0 to 1.6.6)."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="With --to: prefix of every key; the run's files have model.")] = "",
) -> None:
    """Convert published checkpoints to model folders, or back with --to.

    Published files are loaded weights-only; a missing, unknown or misshapen key is an error that names it.
    """
    from dalle_lean.convert import files
    from dalle_lean.terminal import echo
    from dalle_lean.tokenizer import find_tokenizer

    if kind not in ("dalle", "vqgan", "clip"):
        raise UserError(f"--kind {kind}: must be dalle, vqgan or clip")
    if to is not None and kind != "dalle":
        raise UserError(f"--kind {kind} --to: only a DALL-E can be written with published key names")
    if to is not None:
        files.export_dalle(source, out, to, prefix)
    elif kind == "vqgan":
        files.import_vqgan(source, out, config)
    elif kind == "clip":
        files.import_clip(source, out, architecture)
    else:
        files.import_dalle(source, out, config, tokenizer=find_tokenizer(tokenizer), vqgan=vqgan)
    echo(f"wrote {out}")
