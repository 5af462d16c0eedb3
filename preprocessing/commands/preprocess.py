"""The command `dalle-lean preprocess`."""

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import echo, progress_bar, warn
from dalle_lean.terminal import out as console
from dalle_lean.words import counted

if TYPE_CHECKING:
    from dalle_lean.images.vqgan import VQGAN
    from preprocessing.encoding.encode import MakeParts
    from preprocessing.shards.manifest import DatasetInfo
    from preprocessing.sources import Source


def preprocess(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder with metadata.jsonl or with a .txt beside each picture, WebDataset tars or Parquet with "
            "pictures (folder, file or pattern, also remote), or the name of a data set on the hub.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder for the shards; the same command continues a killed run.")
    ],
    vqgan: Annotated[Path | None, typer.Option(help="VQGAN folder. [default: the bundled model's]")] = None,
    picture_side: Annotated[int | None, typer.Option(help="Side in pixels. [default: the VQGAN's]")] = None,
    crops: Annotated[
        int, typer.Option(help="Squares cropped from a long picture, a row each; 1 crops the centre.")
    ] = 1,
    flip: Annotated[bool, typer.Option("--flip", help="Add the mirror image of each square as a row.")] = False,
    split: Annotated[str, typer.Option(help="Split of a data set on the hub.")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of a data set on the hub.")] = None,
    picture_column: Annotated[str | None, typer.Option(help="Column of the pictures. [default: by its name]")] = None,
    caption_column: Annotated[str | None, typer.Option(help="Column of the captions. [default: by its name]")] = None,
    min_caption_length: Annotated[int, typer.Option(help="In characters; 0 also takes pictures without any.")] = 3,
    allowed_nsfw: Annotated[str, typer.Option(help="NSFW labels to keep, separated by commas, or 'any'.")] = "UNLIKELY",
    min_side: Annotated[int, typer.Option(help="Of the original's shorter side, in pixels.")] = 1,
    max_aspect_ratio: Annotated[float, typer.Option(help="Longer : shorter side of the original; 0 is off.")] = 2.0,
    max_hash_distance: Annotated[
        int | None,
        typer.Option(
            help="Reject copies within a shard whose perceptual hashes differ in at most this many of 64 bits; 6 finds "
            "resized ones. [default: keep copies]"
        ),
    ] = None,
    max_pixels: Annotated[int, typer.Option(help="Reject pictures with more pixels.")] = 2**26,
    max_memory: Annotated[int, typer.Option(help="Memory limit for decoding one picture, in MiB.")] = 1024,
    explain: Annotated[bool, typer.Option("--explain", help="Write rejected.jsonl: keys and reasons.")] = False,
    batch_size: Annotated[int, typer.Option(help="Pictures to encode at once.")] = 32,
    shard_rows: Annotated[int, typer.Option(help="Pictures per shard, unless the source is already in shards.")] = 4096,
    bf16: Annotated[
        bool | None,
        typer.Option(help="Encode in bfloat16: faster, a few codes differ. [default: on a GPU]", show_default=False),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Decoding processes per device. [default: one per core, at most 16]")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:N, or several separated by commas; auto takes every GPU.")
    ] = "auto",
    part: Annotated[
        str, typer.Option(metavar="I/N", help="Make every N-th shard from the I-th: the share of one of N machines.")
    ] = "1/1",
    gather: Annotated[
        bool, typer.Option("--gather", help="Encode nothing; write dataset.json if every shard is there.")
    ] = False,
    cluster: Annotated[
        Literal["ray"] | None, typer.Option(help="Spread the shards over a Ray cluster's machines.")
    ] = None,
    cluster_workers: Annotated[
        int | None,
        typer.Option(help="Encoding processes of the cluster. [default: one per GPU, or without GPUs per machine]"),
    ] = None,
) -> None:
    """Turn pictures with captions into shards of VQGAN codes."""
    from preprocessing.encoding.encode import preprocess as run
    from preprocessing.encoding.filters import Rules
    from preprocessing.sources import open_source

    share = parse_part(part)
    pictures = open_source(
        source, shard_rows, split=split, config=config, picture_column=picture_column, caption_column=caption_column
    )
    check_apart(source, pictures, out)
    rules = Rules(
        min_caption_length=min_caption_length,
        allowed_nsfw=parse_labels(allowed_nsfw),
        min_side=min_side,
        max_aspect_ratio=max_aspect_ratio or None,
        max_hash_distance=max_hash_distance,
    )
    model = load_vqgan(vqgan)
    make, where, gpu = pick_makers(device, cluster, cluster_workers, gather)
    started, encoded = time.perf_counter(), 0
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
            crops=crops,
            flip=flip,
            rules=rules,
            max_pixels=max_pixels,
            memory_bytes=max_memory * 2**20,
            explain=explain,
            batch_size=batch_size,
            bf16=gpu if bf16 is None else bf16,
            workers=workers,
            share=share,
            make=make,
            on_progress=on_progress,
        )
    seconds = time.perf_counter() - started
    if info:
        show_counts(info, out)
    if encoded:
        echo(f"{counted(encoded, 'picture')} in {seconds:.1f} s on {where}")
    if info:
        echo(f"{counted(len(info.shards), 'shard')} of {info.image_side}x{info.image_side} codes in {out}")
    else:
        echo(f"part {part} is done, others are not; the run that makes the last shard writes {out / 'dataset.json'}")


def check_apart(source: str, pictures: "Source", out: Path) -> None:
    """UserError if the shards in `out` would lie among the local files of the source."""
    from preprocessing.sources.folder import CaptionedFolder

    path = Path(source)
    if "://" in source or not (path.exists() or "*" in source or "{" in source):
        return
    folder, to = (path if path.is_dir() else path.parent).resolve(), out.resolve()
    # A folder with a text beside each picture takes all pictures below it, such as contact sheets of shards.
    if to == folder or (isinstance(pictures, CaptionedFolder) and to.is_relative_to(folder)):
        raise UserError(f"{out} is in the folder of the pictures: name another one for the shards, such as runs/shards")


def parse_part(part: str) -> tuple[int, int]:
    """Parse a part such as "2/8" into (2, 8)."""
    number, slash, of = part.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UserError(f"part={part!r}: must be I/N with I from 1 to N, such as 2/8")
    return int(number), int(of)


def parse_labels(labels: str) -> list[str] | None:
    """Parse labels separated by commas, or "any" into None; warns of labels that LAION does not have."""
    from preprocessing.encoding.filters import LAION_LABELS

    if labels == "any":
        return None
    names = [name.strip() for name in labels.split(",")]
    if unknown := [name for name in names if name and name not in LAION_LABELS]:
        warn(f"allowed_nsfw: {', '.join(unknown)}: not one of LAION's labels, {', '.join(LAION_LABELS)}")
    return names


def load_vqgan(folder: Path | None) -> "VQGAN":
    """The VQGAN in a folder, by default the bundled model's."""
    from dalle_lean.images.vqgan import VQGAN
    from dalle_lean.io.model_folder import bundled_model

    return VQGAN.load(folder or bundled_model() / "vqgan")


def pick_makers(
    device: str, cluster: str | None, cluster_workers: int | None, gather: bool
) -> tuple["MakeParts | None", str, bool]:
    """The function that encodes (None to gather), what it runs on, in words, and whether that is GPUs."""
    import torch

    from dalle_lean.devices import pick_device
    from preprocessing.encoding.pipeline import make_parts
    from preprocessing.encoding.ray_data import make_on_devices, make_on_ray, num_gpus

    if cluster_workers is not None and cluster_workers < 1:
        raise UserError(f"cluster_workers={cluster_workers}: must be positive")
    if cluster:
        gpus = num_gpus()
        make = None if gather else partial(make_on_ray, workers=cluster_workers)
        return make, f"the cluster ({gpus} GPUs)", gpus > 0
    names = device.split(",")
    if device == "auto" and torch.cuda.device_count() > 1:
        names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    picked = [pick_device(name) for name in names]
    gpu = picked[0].type == "cuda"
    if gather:
        return None, "cpu", gpu
    if len(picked) == 1:
        return (lambda job, vqgan, *rest: make_parts(job, vqgan.to(picked[0]), *rest)), str(picked[0]), gpu
    if len({one.type for one in picked}) > 1:
        raise UserError(f"device={device!r}: CPUs and GPUs round differently; choose one kind for all shards")
    return partial(make_on_devices, devices=picked), f"{len(picked)} devices", gpu


def show_counts(info: "DatasetInfo", out: Path) -> None:
    from rich.table import Table

    table = Table("pictures", "count")
    table.columns[1].justify = "right"
    table.add_row("seen", str(info.counts.seen))
    table.add_row("kept", str(info.counts.kept))
    if info.counts.further_views:
        table.add_row("further crops and mirror images", str(info.counts.further_views))
    for reason, count in info.counts.rejected.items():
        table.add_row(f"rejected: {reason}", str(count))
    console.print(table)
    if info.counts.rejected and info.settings.get("explain"):
        echo(f"{out / 'rejected.jsonl'} names each rejected picture")
    elif info.counts.rejected:
        echo("to name each rejected picture, preprocess into a new folder with --explain")
