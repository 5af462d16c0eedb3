"""Deduplicates a folder of shards: leaves out pictures with the same codes as an earlier one.

To a model, pictures with the same codes are the same. A 64-bit hash of its first view's codes identifies a picture;
among 100 million different pictures, the probability that any two share a hash is 0.0003. All hashes and one shard per
thread are in memory.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write, sha256_file
from dalle_lean.progress import OnProgress, unwatched
from dalle_lean.require import require
from preprocessing.encoding.part_records import (
    begin,
    gather,
    is_finished,
    remove_leftovers,
    write_record,
)
from preprocessing.shards.files import (
    READ_ROWS,
    code_batches,
    open_shard,
    read_header,
    shard_sha256,
    write_table,
)
from preprocessing.shards.manifest import NAME, DatasetInfo, Shard, read_dataset_info, write_dataset_info

REASON = "same_codes"
T = TypeVar("T")


class Pictures(NamedTuple):
    """The pictures of a shard, or of several."""

    hashes: NDArray[np.uint64]  # [P], of the codes of each picture's first view
    views: NDArray[np.uint16]  # [P], rows of each picture


def dedupe(
    folder: str | Path, out: str | Path, *, threads: int | None = None, on_progress: OnProgress = unwatched
) -> DatasetInfo:
    """Write the shards of `folder` to `out` with the first of each picture, in the order of shards and rows.

    Names, columns and order stay; a shard that loses nothing is copied byte for byte, one that loses all its rows is
    left out. Pictures left out count as rejected for "same_codes". The same call continues a killed run, and writes the
    same bytes. `threads` shards are processed at once, by default one per core. Progress counts each row twice: when it
    is read and when it is written.

    Raises UserError for a shard that is damaged or not the one in dataset.json, and if `out` holds anything else.
    """
    folder, out = Path(folder), Path(out)
    info = read_dataset_info(folder)
    settings = {**info.settings, "deduped": sha256_file(folder / NAME)}
    if (out / NAME).exists():
        if read_dataset_info(out).settings != settings:
            raise UserError(f"{out} has a {NAME} already, of something else; choose another folder")
    else:
        make_shards(info, folder, out, settings, threads or os.cpu_count() or 1, on_progress)
    remove_leftovers(out)
    return read_dataset_info(out)


def make_shards(
    info: DatasetInfo, folder: Path, out: Path, settings: dict[str, Any], threads: int, on_progress: OnProgress
) -> None:
    """Write all files in `out`, dataset.json last."""
    begin(out, settings, "*.parquet")
    done = 0

    def each(function: Callable[..., T], *of_shards: Sequence[Any]) -> Iterator[T]:
        """Call `function` with each shard and its items of `of_shards`; yield the results in order."""
        nonlocal done
        for shard, result in zip(info.shards, pool.map(function, info.shards, *of_shards), strict=True):
            done += shard.rows
            on_progress(done, 2 * info.num_rows, shard.file)
            yield result

    with ThreadPoolExecutor(threads, thread_name_prefix="dedupe") as pool:
        try:
            found = list(each(lambda shard: read_pictures(folder / shard.file, shard, info)))
            if (count := sum(len(pictures.hashes) for pictures in found)) != info.counts.kept:
                raise UserError(
                    f"{folder}: {NAME} has kept={info.counts.kept}, but the keys are those of {count} pictures"
                )
            first = first_of_each(np.concatenate([pictures.hashes for pictures in found]))
            views = [pictures.views for pictures in found]
            keep = np.split(first, np.cumsum([len(one) for one in views[:-1]]))
            for _ in each(lambda *of_shard: write_part(folder, out, *of_shard), views, keep):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
    counts, shards = gather(out, [part_name(shard) for shard in info.shards])
    rejected = Counter(info.counts.rejected)
    rejected.update(counts.rejected)
    counts = replace(counts, seen=info.counts.seen, rejected=dict(sorted(rejected.items())))
    write_dataset_info(out, replace(info, counts=counts, shards=shards, settings=settings))


def part_name(shard: Shard) -> str:
    return shard.file.removesuffix(".parquet")


def read_pictures(path: Path, shard: Shard, info: DatasetInfo) -> Pictures:
    """The pictures of a shard; UserError if it is damaged or not the file in dataset.json."""
    read_header(path)  # fast, however large the file
    if shard_sha256(path) != shard.sha256:
        raise UserError(f"{path} is not the file in {NAME}; dalle-lean shards verify tells more")
    columns = ("code", "key") if info.counts.further_views else ("code",)
    digests: list[bytes] = []
    keys: list[str] = []
    with open_shard(path) as file:
        for batch in code_batches(file, columns=columns, batch_size=READ_ROWS):
            digests += [blake2b(code, digest_size=8).digest() for code in batch.column("code").to_pylist()]
            keys += batch.column("key").to_pylist() if "key" in columns else ()
    hashes = np.frombuffer(b"".join(digests), "<u8")
    if "key" not in columns:
        return Pictures(hashes, np.ones(len(hashes), np.uint16))
    views = views_of_pictures(keys)
    return Pictures(hashes[views.cumsum() - views], views.astype(np.uint16))


def views_of_pictures(keys: Sequence[str]) -> NDArray[np.int64]:
    """The number of rows of each picture: the first has the picture's key, the others the key with "#1", "#2", ..."""
    views: list[int] = []
    first = ""
    for key in keys:
        if views and key == f"{first}#{views[-1]}":
            views[-1] += 1
        else:
            first = key
            views.append(1)
    return np.array(views, np.int64)


def first_of_each(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """[P]: whether each hash is the first of its value."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.ones(len(hashes), bool)
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first


def write_part(folder: Path, out: Path, shard: Shard, views: NDArray[np.uint16], keep: NDArray[np.bool_]) -> None:
    """Write the pictures of a shard where `keep` [P] is true, each with `views` [P] rows, and the shard's record."""
    name = part_name(shard)
    if is_finished(out, name):
        return
    kept = int(keep.sum())
    if kept == len(keep):
        with atomic_write(out / shard.file) as temporary:
            shutil.copyfile(folder / shard.file, temporary)
        written: Shard | None = shard
    elif kept:
        pa = require("pyarrow", extra="preprocessing")
        mask = pa.array(np.repeat(keep, views))
        with open_shard(folder / shard.file) as file:
            rows = file.read()
        rows = rows.filter(mask)
        written = write_table(out / shard.file, rows)
    else:
        written = None
    write_record(out, name, written, kept, {REASON: len(keep) - kept})
