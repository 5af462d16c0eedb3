"""Rows of a shard from any row on, in runs of a chosen length: column by column, never row by row.

Shapes: N rows, I codes of a picture.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dalle_lean.errors import UserError
from dalle_lean.io.remote_errors import Unreachable
from dalle_lean.require import require
from preprocessing.shards.files import code_batches, damaged, decode_rows, keys_of
from training.data.catalog import ShardSet

T = TypeVar("T")
READ_ROWS = 1024
COLUMNS = ("caption", "code", "key")
BUFFER_BYTES = 2**20
"""Read of a column at once: what an open shard holds in memory does not grow with the shard."""


class DamagedShard(UserError):
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
    with open_shard(shards, index) as file:
        ends = group_ends(file)
        groups = [group for group in range(len(ends) - 1) if ends[group + 1] > start]
        if not groups:
            return
        tables = batches(file, groups, count, COLUMNS if codes else ("caption", "key"))
        for table in runs(tables, start - ends[groups[0]], first_count or count, count):
            yield decode(table, range(start, start + len(table)), shards, codes)
            start += len(table)


def read_places(shards: ShardSet, index: int, places: Sequence[int]) -> Iterator[Rows]:
    """The rows of shard `index` at these places, which rise: those alone are decoded, and nothing behind them is read.

    Raises as `read_rows` does.
    """
    with open_shard(shards, index) as file:
        for group, (start, end) in enumerate(pairwise(group_ends(file))):
            left = [place for place in places if start <= place < end]
            parts = batches(file, [group], READ_ROWS, COLUMNS)
            while left and (batch := next(parts, None)) is not None:
                here = [place for place in left if place < start + len(batch)]
                if here:
                    yield decode(batch.take([place - start for place in here]), here, shards)
                start, left = start + len(batch), left[len(here) :]


def read_keys(shards: ShardSet, index: int) -> Iterator[list[str]]:
    """The keys of shard `index`, some at a time; a shard without has the numbers of its rows. Raises as `read_rows`."""
    with open_shard(shards, index) as file:
        if "key" not in file.schema_arrow.names:
            yield [str(number) for number in range(file.metadata.num_rows)]
            return
        for batch in batches(file, range(file.metadata.num_row_groups), READ_ROWS, ("key",)):
            yield keys_of(batch, ())


def whole_shard(shards: ShardSet, index: int, *, codes: bool = True) -> Iterator[Rows]:
    """The rows of shard `index`, some at a time; damage is reported, and the rest of it passed over."""
    yield from undamaged(shards, read_rows(shards, index, 0, READ_ROWS, codes=codes))


def undamaged(shards: ShardSet, parts: Iterator[T]) -> Iterator[T]:
    """What of a shard is read before it turns out damaged, which is reported."""
    try:
        yield from parts
    except DamagedShard as damage:
        shards.on_notice(f"{damage}; passed over")


@contextmanager
def open_shard(shards: ShardSet, index: int) -> Iterator[Any]:
    """Shard `index` as a Parquet file; whatever is wrong with it while it is open is a DamagedShard."""
    arrow, parquet = require("pyarrow", extra="training"), require("pyarrow.parquet", extra="training")
    rows = shards.rows[index]
    try:
        with (
            shards.open(index) as content,
            parquet.ParquetFile(content, buffer_size=BUFFER_BYTES, pre_buffer=False) as file,
        ):
            if rows is not None and file.metadata.num_rows != rows:
                raise UserError(f"it has {file.metadata.num_rows} rows, its data set says {rows}")
            yield file
    except Unreachable:
        raise
    except (OSError, ValueError, KeyError, TypeError, arrow.ArrowException) as error:
        raise DamagedShard(str(damaged(shards.paths[index], error))) from None


def group_ends(file: Any) -> list[int]:
    """The first row of each row group, and behind the last one how many rows there are."""
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    ends: list[int] = np.cumsum([0, *sizes]).tolist()
    return ends


def batches(file: Any, groups: Sequence[int], batch_size: int, columns: Sequence[str]) -> Iterator[Any]:
    """These row groups as Arrow batches.

    One row group at a time: batches that reach over several begin where the reader did, and so would what is lost with
    a damaged page.
    """
    for group in groups:
        # In this thread: one that waits for a remote would keep Arrow's few threads from everybody else.
        yield from code_batches(file, columns=columns, batch_size=batch_size, row_groups=[group], use_threads=False)


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


def decode(table: Any, numbers: Sequence[int], shards: ShardSet, codes: bool = True) -> Rows:
    """The rows of a table or batch; `numbers` are theirs in the shard."""
    info = shards.info
    return Rows(*decode_rows(table, numbers, info.num_codes, info.codebook_size, with_codes=codes))
