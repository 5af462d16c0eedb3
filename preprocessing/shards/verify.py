"""Finds damaged, missing and foreign files in a folder of shards."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.progress import OnProgress, unwatched
from dalle_lean.words import counted
from preprocessing.shards.files import COLUMNS, DamagedShard, read_blocks, read_header, shard_sha256
from preprocessing.shards.manifest import ADOPTED, NAME, DatasetInfo, Shard, read_manifest
from preprocessing.shards.mix import MIXED

SHOWN_DIGITS = 12


@dataclass(frozen=True)
class Fault:
    """A file of the folder and what is wrong with it."""

    file: str
    problem: str


def find_faults(
    folder: str | Path, *, vqgan: VQGAN | None = None, threads: int | None = None, on_progress: OnProgress = unwatched
) -> list[Fault]:
    """Everything wrong with a folder of shards, by file; empty if all is well.

    Checks of each shard in dataset.json: that it exists, its SHA-256, rows and columns, the length and range of every
    code, and the VQGAN that made it, if the shard names it. Checks of the folder: shards that dataset.json does not
    name, temporary files of killed runs, the same shard under two names, and that `vqgan`, if given, made the codes.
    `threads` shards are read at once, by default one per core. Progress counts rows.

    Raises UserError if dataset.json itself is missing or invalid.
    """
    folder = Path(folder)
    info = read_manifest(folder)
    faults = [Fault(NAME, problem) for problem in manifest_problems(info, vqgan)]
    done = 0
    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="verify") as pool:
        found = pool.map(lambda shard: list(shard_problems(folder / shard.file, shard, info)), info.shards)
        try:
            for shard, problems in zip(info.shards, found, strict=True):
                faults += [Fault(shard.file, problem) for problem in problems]
                done += shard.rows
                on_progress(done, info.num_rows, counted(len(faults), "fault") if faults else "")
        finally:
            pool.shutdown(cancel_futures=True)
    return faults + list(foreign_files(folder, info))


def manifest_problems(info: DatasetInfo, vqgan: VQGAN | None) -> Iterator[str]:
    first: dict[str, str] = {}
    for shard in info.shards:
        other = first.setdefault(shard.sha256, shard.file)
        if other != shard.file and MIXED not in info.settings:
            yield f"{shard.file} is the same as {other}"
    if info.counts.seen != info.counts.kept + sum(info.counts.rejected.values()):
        yield f"seen={info.counts.seen}, but {info.counts.kept} kept and {sum(info.counts.rejected.values())} rejected"
    if vqgan is None:
        return
    try:
        vqgan.check_reads(info.vqgan, "the codes are")
    except UserError as error:
        yield str(error)
        return
    if info.codebook_size != vqgan.config.codebook_size:
        yield f"codebook_size={info.codebook_size}, but the VQGAN has {vqgan.config.codebook_size} codes"
    elif info.picture_side != info.image_side * vqgan.config.downscale:
        yield (
            f"picture_side={info.picture_side}, but image_side={info.image_side} codes stand for "
            f"{info.image_side * vqgan.config.downscale} pixels"
        )


def shard_problems(path: Path, shard: Shard, info: DatasetInfo) -> Iterator[str]:
    if not path.is_file():
        yield "is not there"
        return
    try:
        header = read_header(path)
        sha256 = shard_sha256(path)
        if sha256 != shard.sha256:
            yield f"SHA-256 is {sha256[:SHOWN_DIGITS]}; must be {shard.sha256[:SHOWN_DIGITS]}"
        if header.vqgan not in (None, info.vqgan):
            yield f"foreign: its codes are of the VQGAN {str(header.vqgan)[:SHOWN_DIGITS]}"
        needed = () if ADOPTED in info.settings else COLUMNS
        if missing := [name for name in needed if name not in header.columns]:
            yield f"has no column {', '.join(missing)}"
        rows = sum(map(len, read_blocks(path, info.num_codes, info.codebook_size)))
    except DamagedShard as error:
        yield str(error).removeprefix(f"{path} ").removeprefix("is ")
        return
    if rows != shard.rows:
        yield f"{rows} rows; must be {shard.rows}"


def foreign_files(folder: Path, info: DatasetInfo) -> Iterator[Fault]:
    """Shards in or below the folder that dataset.json does not name, and temporary files of killed runs."""
    named = {folder / shard.file for shard in info.shards}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".parquet" and path not in named:
            yield Fault(path.relative_to(folder).as_posix(), "foreign: dataset.json does not name it")
        elif path.name.startswith(".") and path.suffix == ".tmp":
            yield Fault(path.relative_to(folder).as_posix(), "left half written by a killed run; may be removed")
