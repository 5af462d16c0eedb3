"""Rows of a shard from any row on, in runs of a chosen length: column by column, never row by row.

Shapes: N rows, I codes of a picture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dalle_lean.require import require
from preprocessing.shards import code_batches, damaged, decode_codes
from training.retry import Unreachable
from training.shard_set import ShardSet

READ_ROWS = 1024
BUFFER_BYTES = 2**20
"""Read of a column at once: what an open shard holds in memory does not grow with the shard."""


class DamagedShard(ValueError):
    """A shard cannot be read, or holds something else than its data set says."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of shards."""

    captions: list[str]
    codes: NDArray[np.int16]
    """[N, I]; [N, 0] where they were not asked for."""
    keys: list[str]

    @classmethod
    def none(cls) -> Self:
        """No rows."""
        return cls([], np.empty((0, 0), np.int16), [])

    def __len__(self) -> int:
        return len(self.captions)

    def take(self, places: Sequence[int]) -> "Rows":
        """The rows at these places, in this order."""
        return Rows([self.captions[place] for place in places], self.codes[places], [self.keys[at] for at in places])

    def part(self, start: int, end: int) -> "Rows":
        """The rows start..end-1, without a copy of the codes."""
        return Rows(self.captions[start:end], self.codes[start:end], self.keys[start:end])


def join(parts: Sequence[Rows]) -> Rows:
    """One or more runs of rows as one."""
    parts = [part for part in parts if len(part)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    return Rows(
        [caption for part in parts for caption in part.captions],
        np.concatenate([part.codes for part in parts]),
        [key for part in parts for key in part.keys],
    )


def read_rows(
    shards: ShardSet, index: int, start: int, count: int, *, first_count: int | None = None, codes: bool = True
) -> Iterator[Rows]:
    """The rows of shard `index` from row `start` on, checked: first `first_count`, then `count` at a time.

    To begin inside a shard, its rows from the beginning of a Parquet row group on are read and dropped. A shard without
    keys has the numbers of its rows for keys. `codes=False` reads captions and keys only.

    Raises DamagedShard, and Unreachable where a remote cannot be read at all.
    """
    path = shards.paths[index]
    arrow = require("pyarrow", extra="training")
    try:
        with shards.open(index) as content:
            yield from parquet_rows(content, shards, index, start, count, first_count or count, codes)
    except Unreachable:
        raise
    except (OSError, ValueError, KeyError, TypeError, arrow.ArrowException) as error:
        raise DamagedShard(str(damaged(path, error))) from None


def whole_shard(shards: ShardSet, index: int, *, codes: bool = True) -> Iterator[Rows]:
    """The rows of shard `index`, some at a time; where it is damaged that is told, and the rest of it passed over."""
    try:
        yield from read_rows(shards, index, 0, READ_ROWS, codes=codes)
    except DamagedShard as damage:
        shards.on_notice(f"{damage}; passed over")


def parquet_rows(
    content: Any, shards: ShardSet, index: int, start: int, count: int, first_count: int, codes: bool
) -> Iterator[Rows]:
    """See `read_rows`."""
    rows = shards.rows[index]
    parquet = require("pyarrow.parquet", extra="training")
    with parquet.ParquetFile(content, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        if rows is not None and file.metadata.num_rows != rows:
            raise ValueError(f"it has {file.metadata.num_rows} rows, its data set says {rows}")
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        ends = np.cumsum([0, *sizes]).tolist()
        groups = [group for group in range(len(sizes)) if ends[group + 1] > start]
        if not groups:
            return
        # In this thread: one that waits for a remote would keep Arrow's few threads from everybody else.
        columns = ("caption", "code", "key") if codes else ("caption", "key")
        read = partial(code_batches, file, columns=columns, batch_size=count, use_threads=False)
        # One row group at a time: batches that reach over several begin where the reader did, and so would what is
        # lost with a damaged page.
        batches = chain.from_iterable(read(row_groups=[group]) for group in groups)
        for table in runs(batches, start - ends[groups[0]], first_count, count):
            yield decode(table, start, shards, codes)
            start += len(table)


def runs(batches: Iterator[Any], skip: int, first_count: int, count: int) -> Iterator[Any]:
    """The rows of Arrow batches after the first `skip`, as a table of `first_count` rows, then of `count` (the last one
    has fewer)."""
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


def decode(table: Any, first: int, shards: ShardSet, codes: bool) -> Rows:
    """The rows of a table; `first` is the number of the first one in its shard."""
    captions = table.column("caption").to_pylist()
    if not all(isinstance(caption, str) for caption in captions):
        raise ValueError(f"a caption among rows {first} to {first + len(captions) - 1} is missing")
    if "key" in table.column_names:
        keys = [str(key) for key in table.column("key").to_pylist()]
    else:
        keys = [str(first + place) for place in range(len(captions))]
    if not codes:
        return Rows(captions, np.empty((len(captions), 0), np.int16), keys)
    found = decode_codes(table.column("code").to_pylist(), shards.info.num_codes, shards.info.codebook_size)
    return Rows(captions, found, keys)
