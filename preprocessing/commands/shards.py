"""The commands `dalle-lean shards verify`, `show`, `adopt`, `mix`, `dedupe` and `publish`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dalle_lean.terminal import OTHER_DESTINATIONS, Device, echo, progress_bar
from dalle_lean.terminal import out as console
from dalle_lean.words import counted

if TYPE_CHECKING:
    from preprocessing.shards.manifest import DatasetInfo

shards = typer.Typer(
    help="Check, show, adopt, mix, deduplicate and publish folders of shards.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of shards.")]


@shards.command()
def verify(
    folder: Folder,
    vqgan: Annotated[Path | None, typer.Option(help="VQGAN folder that made the codes. [default: any]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Shards read at once. [default: one per core]")] = None,
) -> None:
    """Read all shards and list what is damaged, missing or foreign; exit code 1 if anything is."""
    from rich.table import Table

    from preprocessing.commands.preprocess import load_vqgan
    from preprocessing.shards.manifest import read_manifest
    from preprocessing.shards.verify import find_faults

    model = None if vqgan is None else load_vqgan(vqgan)
    with progress_bar("verify", "pictures") as on_progress:
        faults = find_faults(folder, vqgan=model, threads=threads, on_progress=on_progress)
    info = read_manifest(folder)
    if not faults:
        echo(f"{folder}: {shards_and_pictures(info)}, all sound")
        return
    table = Table("file", "what is wrong")
    for fault in faults:
        table.add_row(fault.file, fault.problem)
    console.print(table, markup=False)
    files = len({fault.file for fault in faults})
    echo(f"{folder}: {files} of its files {'is' if files == 1 else 'are'} not sound ({shards_and_pictures(info)})")
    raise typer.Exit(1)


@shards.command()
def show(
    folder: Folder,
    out: Annotated[Path | None, typer.Option(help="PNG to write. [default: DIR/contact_sheet.png]")] = None,
    count: Annotated[int, typer.Option(min=1, max=1024, help="Number of pictures, drawn at random.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    vqgan: Annotated[
        Path | None, typer.Option(help="VQGAN folder that made the codes. [default: the bundled model's, if it did]")
    ] = None,
    device: Device = "auto",
) -> None:
    """Write a sheet of decoded pictures with their captions, and print statistics."""
    from rich.table import Table

    from dalle_lean.devices import pick_device
    from dalle_lean.io.files import atomic_write
    from preprocessing.commands.preprocess import load_vqgan
    from preprocessing.shards.contact_sheet import contact_sheet, decode_sample
    from preprocessing.shards.manifest import read_dataset_info
    from preprocessing.shards.statistics import collect_statistics

    model = load_vqgan(vqgan)
    advice = "; name the one that made them with --vqgan"
    model.check_reads(read_dataset_info(folder).vqgan, f"{folder}: the codes are", advice)
    model.to(pick_device(device))
    with progress_bar("read", "pictures") as on_progress:
        statistics = collect_statistics(folder, count=count, seed=seed, on_progress=on_progress)
    with progress_bar("decode", "pictures") as on_progress:
        pictures = decode_sample(statistics.sample, model, on_progress)
    out = out or folder / "contact_sheet.png"
    with atomic_write(out) as temporary:
        contact_sheet(folder.resolve().name, statistics, pictures).save(temporary, format="PNG")
    table = Table(show_header=False)
    for name, value in statistics.facts():
        table.add_row(name, value)
    console.print(table, markup=False)
    echo(f"{out} shows {statistics.shown()}")


@shards.command()
def adopt(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of Parquet files with captions and codes.")],
    vqgan: Annotated[Path, typer.Option(help="VQGAN folder that made the codes.")],
) -> None:
    """Turn published Parquet files into a folder of shards: check them all and write dataset.json."""
    from preprocessing.commands.preprocess import load_vqgan
    from preprocessing.shards.import_shards import import_shards

    with progress_bar("adopt", "pictures") as on_progress:
        info = import_shards(folder, load_vqgan(vqgan), on_progress=on_progress)
    echo(f"{folder}: {shards_and_pictures(info)}, taken to be codes of the VQGAN {info.vqgan[:12]}")


@shards.command()
def mix(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder of shards.")],
    sources: Annotated[
        list[str], typer.Argument(metavar="DIR[:TIMES]", help="Folders of shards; cats:20 counts 20 times.")
    ],
) -> None:
    """Make one folder of several for `train`; the shards are hard links, which take almost no space."""
    from preprocessing.shards.mix import mix as run

    info = run([read_times(source) for source in sources], out)
    echo(f"{out}: {shards_and_pictures(info)}")


@shards.command()
def dedupe(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the shards without duplicates.")],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Shards held in memory at once. [default: one per core]")
    ] = None,
) -> None:
    """Leave out pictures with the same codes as an earlier one, in any shard. The same command continues a killed
    run."""
    from preprocessing.shards.dedupe import REASON
    from preprocessing.shards.dedupe import dedupe as run
    from preprocessing.shards.manifest import read_manifest

    with progress_bar("dedupe", "rows") as on_progress:
        info = run(folder, out, threads=threads, on_progress=on_progress)
    before = read_manifest(folder)
    dropped = before.counts.kept - info.counts.kept
    echo(f"{out}: {shards_and_pictures(info)}; {dropped:,} of {before.counts.kept:,} left out ({REASON})")


@shards.command()
def publish(
    folder: Folder,
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help=f"hf://datasets/OWNER/NAME, {OTHER_DESTINATIONS}.")
    ],
    license: Annotated[str, typer.Option(help="Of the data, as the hub names it.")] = "unknown",
    license_link: Annotated[str | None, typer.Option(help="URL of a license that the hub has no name for.")] = None,
) -> None:
    """Copy a folder of shards, with a card, to where others can read it. The same command sends only what has changed,
    and continues a killed run."""
    from dalle_lean.io.publish import check_destination
    from dalle_lean.io.publish import publish as run
    from preprocessing.shards.publish import shard_files

    check_destination(destination, "dataset")
    files = shard_files(folder, destination.rstrip("/").rpartition("/")[2], license=license, license_link=license_link)
    with progress_bar("publish", "files") as on_progress:
        done = run(files, destination, message="Publish shards", on_progress=on_progress)
    echo(f"{destination}: {done}")


def read_times(source: str) -> tuple[Path, int]:
    """Parse DIR or DIR:TIMES."""
    folder, _, times = source.rpartition(":")
    return (Path(folder), int(times)) if folder and times.isdecimal() else (Path(source), 1)


def shards_and_pictures(info: "DatasetInfo") -> str:
    rows = f" in {counted(info.num_rows, 'row')}" if info.counts.further_views else ""
    return f"{counted(len(info.shards), 'shard')}, {counted(info.counts.kept, 'picture')}{rows}"
