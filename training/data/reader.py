"""Reads a shard from any row on, in chunks of a chosen length: column by column, never row by row."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from dalle_lean.require import require
from preprocessing.shards.files import DamagedShard, Rows, code_batches, decode_rows, keys_of
from training.data.catalog import ShardSet

T = TypeVar("T")
READ_ROWS = 1024
COLUMNS = ("caption", "code", "key")


def read_rows(
    shards: ShardSet, index: int, start: int, count: int, *, first_count: int | None = None, codes: bool = True
) -> Iterator[Rows]:
    """Read and check shard `index` from row `start` on: first `first_count` rows, then `count` at a time.

    Reading starts at a Parquet row group; rows of it before `start` are dropped. In a shard without keys, row numbers
    serve as keys. `codes=False` reads captions and keys only.

    Raises DamagedShard, or Unreachable if a remote cannot be read at all.
    """
    info = shards.info
    with shards.open(index) as file:
        bounds = group_bounds(file)
        groups = [group for group in range(len(bounds) - 1) if bounds[group + 1] > start]
        if not groups:
            return
        tables = batches(file, groups, count, COLUMNS if codes else ("caption", "key"))
        for table in rechunk(tables, start - bounds[groups[0]], first_count or count, count):
            numbers = range(start, start + len(table))
            yield decode_rows(table, numbers, info.num_codes, info.codebook_size, with_codes=codes)
            start += len(table)


def read_rows_at(shards: ShardSet, index: int, wanted: Sequence[int]) -> Iterator[Rows]:
    """Read the `wanted` rows of shard `index`, given in ascending order: only they are decoded, and each row group is
    read no further than its last one.

    Raises as `read_rows` does.
    """
    info = shards.info
    with shards.open(index) as file:
        for group, (start, end) in enumerate(pairwise(group_bounds(file))):
            left = [row for row in wanted if start <= row < end]
            parts = batches(file, [group], READ_ROWS, COLUMNS)
            while left and (batch := next(parts, None)) is not None:
                here = [row for row in left if row < start + len(batch)]
                if here:
                    chosen = batch.take([row - start for row in here])
                    yield decode_rows(chosen, here, info.num_codes, info.codebook_size)
                start, left = start + len(batch), left[len(here) :]


def read_keys(shards: ShardSet, index: int) -> Iterator[list[str]]:
    """Read the keys of shard `index` in batches; row numbers if it has none. Raises as `read_rows` does."""
    with shards.open(index) as file:
        if "key" not in file.schema_arrow.names:
            yield [str(number) for number in range(file.metadata.num_rows)]
            return
        for batch in batches(file, range(file.metadata.num_row_groups), READ_ROWS, ("key",)):
            yield keys_of(batch, ())


def undamaged(shards: ShardSet, parts: Iterator[T]) -> Iterator[T]:
    """The parts read before the shard turns out to be damaged, which is reported."""
    try:
        yield from parts
    except DamagedShard as damage:
        shards.on_notice(f"{damage}; the rest of it is skipped")


def group_bounds(file: Any) -> list[int]:
    """The first row of each row group, then the number of rows."""
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    bounds: list[int] = np.cumsum([0, *sizes]).tolist()
    return bounds


def batches(file: Any, groups: Sequence[int], batch_size: int, columns: Sequence[str]) -> Iterator[Any]:
    """These row groups as Arrow batches, none of which spans two groups.

    Batches across groups would be aligned to where the reader started, and so would the rows lost with a damaged page.
    """
    for group in groups:
        # In this thread: waiting for a remote would block Arrow's few threads for all readers.
        yield from code_batches(file, columns=columns, batch_size=batch_size, row_groups=[group], use_threads=False)


def rechunk(batches: Iterator[Any], skip: int, first_count: int, count: int) -> Iterator[Any]:
    """Regroup Arrow batches, without their first `skip` rows, into tables of `first_count` rows, then of `count`; the
    last may be shorter."""
    arrow = require("pyarrow", extra="training")
    waiting, wanted = None, first_count
    for batch in batches:
        skipped = min(skip, len(batch))
        skip -= skipped
        table = arrow.Table.from_batches([batch.slice(skipped)])
        waiting = table if waiting is None else arrow.concat_tables([waiting, table])
        while len(waiting) >= wanted:
            yield waiting.slice(0, wanted)
            waiting, wanted = waiting.slice(wanted), count
    if waiting is not None and len(waiting):
        yield waiting
