"""The command `dalle-lean preprocess`."""

from pathlib import Path
from typing import Annotated

import typer

from dalle_lean.terminal import Device, progress_bar, say
from dalle_lean.terminal import out as console


def preprocess(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Folder with metadata.jsonl, or with a .txt beside each picture.")
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder for the shards; the same command continues a killed run.")
    ],
    vqgan: Annotated[Path | None, typer.Option(help="VQGAN folder; by default the bundled model's.")] = None,
    picture_side: Annotated[int | None, typer.Option(help="Pixels; by default the VQGAN's own.")] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures encoded at once.")] = 32,
    shard_rows: Annotated[int, typer.Option(help="Pictures of the source that make one shard.")] = 4096,
    max_pixels: Annotated[int, typer.Option(help="Larger pictures are not decoded, but counted.")] = 2**26,
    workers: Annotated[int | None, typer.Option(help="Decoding threads; by default one per core, at most 16.")] = None,
    bf16: Annotated[bool, typer.Option(help="Encode in bfloat16: faster, a few codes differ.")] = False,
    device: Device = "auto",
) -> None:
    """Turn pictures with captions into shards of VQGAN codes."""
    import time

    from rich.table import Table

    from dalle_lean.devices import pick_device
    from dalle_lean.folder import bundled_model
    from dalle_lean.vqgan import VQGAN
    from preprocessing.encode import preprocess as run
    from preprocessing.sources import open_source

    pictures = open_source(source, shard_rows)
    where = pick_device(device)
    model = VQGAN.load(vqgan or bundled_model() / "vqgan").to(where)
    started = time.perf_counter()
    encoded = 0
    with progress_bar("preprocess", "pictures") as show:

        def on_progress(done: int, total: int, note: str) -> None:
            nonlocal encoded
            encoded = done
            show(done, total, note)

        info = run(
            pictures,
            out,
            model,
            picture_side=picture_side,
            batch_size=batch_size,
            max_pixels=max_pixels,
            bf16=bf16,
            workers=workers,
            on_progress=on_progress,
        )
    if info is None:
        return
    seconds = time.perf_counter() - started
    table = Table("pictures", "count")
    table.columns[1].justify = "right"
    table.add_row("seen", str(info.counts.seen))
    table.add_row("kept", str(info.counts.kept))
    for reason, count in info.counts.rejected.items():
        table.add_row(f"rejected: {reason}", str(count))
    console.print(table)
    if encoded:
        say(f"{encoded} pictures in {seconds:.1f} s, {encoded / seconds:.1f} pictures/s on {where}")
    shards = "1 shard" if len(info.shards) == 1 else f"{len(info.shards)} shards"
    say(f"{shards} of {info.image_side}x{info.image_side} codes in {out}")
