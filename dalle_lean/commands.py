"""`dalle-lean pack`: puts the parts of a model into one model folder."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.errors import DEFAULT_GUIDANCE_RANGE
from dalle_lean.terminal import OTHER_DESTINATIONS, StoredDtype, echo, progress_bar


def pack(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder to start from, such as RUN/model.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Model folder to write or replace; other files in it stay.")
    ],
    vocabulary: Annotated[Path | None, typer.Option(help="vocabulary.json. [default: the model's]")] = None,
    vqgan: Annotated[Path | None, typer.Option(help="VQGAN folder. [default: the model's]")] = None,
    clip: Annotated[Path | None, typer.Option(help="CLIP folder. [default: the model's]")] = None,
    card: Annotated[Path | None, typer.Option(help="README.md. [default: the model's]")] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            help="Guidance that the model draws with by default; 1 is off. [default: the model's]",
            min=DEFAULT_GUIDANCE_RANGE[0],
            max=DEFAULT_GUIDANCE_RANGE[1],
        ),
    ] = None,
    average: Annotated[
        Path | None,
        typer.Option(help="Model folder from which MODEL was trained further: store the mean of both weights."),
    ] = None,
    dtype: Annotated[
        StoredDtype | None, typer.Option(help="Type of the stored weights. [default: the model's]")
    ] = None,
    publish: Annotated[
        str | None,
        typer.Option(
            metavar="DESTINATION", help=f"Then publish it: hf://OWNER/NAME, {OTHER_DESTINATIONS}.", show_default=False
        ),
    ] = None,
) -> None:
    """Put a model folder together: transformer, tokenizer, vocabulary, VQGAN, CLIP and card, with every part's hash."""
    import torch

    from dalle_lean.io.model_card import model_files
    from dalle_lean.io.model_folder import pack_model
    from dalle_lean.io.publish import check_destination
    from dalle_lean.io.publish import publish as copy

    if publish is not None:
        check_destination(publish, "model")
    stored = None if dtype is None else getattr(torch, dtype)
    parts = {"vocabulary": vocabulary, "vqgan": vqgan, "clip": clip, "card": card}
    pack_model(model, out, **parts, guidance=guidance, average=average, dtype=stored)
    total_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    echo(f"{out}: {total_bytes / 1e6:.1f} MB")
    if publish is not None:
        files = model_files(out, out.resolve().name)
        with progress_bar("publish", "files") as on_progress:
            done = copy(files, publish, message=f"Publish {out.resolve().name}", on_progress=on_progress)
        echo(f"{publish}: {done}")
