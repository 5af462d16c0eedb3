"""Parquet files with the bytes of pictures, as img2dataset, `datasets` and others write them."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from dalle_lean.io.parquet_footer import check_footer
from dalle_lean.io.remote_io import Unreachable
from dalle_lean.require import require
from preprocessing.sources.columns import Columns, Kind, find_columns
from preprocessing.sources.files import File, files_fingerprint, is_remote, part_names
from preprocessing.sources.sample import MAX_CAPTION_BYTES, Sample

MAX_LOST_ROWS = 2**20
"""A row group that cannot be read counts as at most this many samples, whatever a damaged footer says."""


class ParquetShards:
    """Parquet files of pictures, captions and metadata; each file is a part.

    One row and one page of each column are in memory at a time. The rows of an unreadable row group are samples with
    the problem "parquet_broken"; other row groups are read. A file with a damaged footer is one such sample.
    """

    def __init__(self, paths: list[str], *, picture_column: str | None = None, caption_column: str | None = None):
        self.paths = paths
        self.picture_column = picture_column
        self.caption_column = caption_column
        self.parts = part_names(paths)

    def size(self, part: int) -> int | None:
        """Number of rows, from the footer of a local file."""
        if is_remote(self.paths[part]):
            return None
        try:
            with File(self.paths[part]) as file:
                return max(0, open_parquet(file).metadata.num_rows)
        except damage():
            return None

    def check_columns(self) -> None:
        """Check the columns of the first readable file; raises what `find_columns` raises."""
        for path in self.paths:
            try:
                with File(path) as file:
                    schema = open_parquet(file).schema_arrow
            except Unreachable:
                raise
            except damage():
                continue
            self.columns(path, schema)
            return

    def columns(self, path: str, schema: Any) -> Columns:
        kinds = {field.name: kind_of(field.type) for field in schema}
        return find_columns(path, kinds, self.picture_column, self.caption_column)

    def samples(self, part: int) -> Iterator[Sample]:
        path = self.paths[part]
        name = PurePosixPath(path).name
        try:
            with File(path) as file:
                table = open_parquet(file)
                columns = self.columns(path, table.schema_arrow)
                first = 0
                for group in range(table.num_row_groups):
                    yield from read_group(table, group, columns, name, first)
                    first += table.metadata.row_group(group).num_rows
                if first != table.metadata.num_rows:
                    yield Sample(key=f"{name} row {first}", problem="parquet_broken")
        except FileNotFoundError:
            yield Sample(key=name, problem="file_missing")
        except Unreachable:
            raise
        except damage():
            yield Sample(key=name, problem="parquet_broken")

    def fingerprint(self) -> str:
        return files_fingerprint(self.paths)


def read_group(table: Any, group: int, columns: Columns, name: str, first: int) -> Iterator[Sample]:
    """The samples of a row group that begins at row `first` of the file `name`."""
    pa = require("pyarrow", extra="preprocessing")
    selected = [
        f"{column}.bytes" if pa.types.is_struct(table.schema_arrow.field(column).type) else column
        for column in columns.names
    ]
    rows = table.metadata.row_group(group).num_rows
    done = 0
    try:
        # Row by row: compression lets a small file repeat one large value in every row.
        for batch in table.iter_batches(1, row_groups=[group], columns=selected, use_threads=False):
            row = {
                column: batch.column(column)[0].as_py() if column == columns.picture else text_of(batch.column(column))
                for column in columns.names
            }
            sample = columns.sample(row, f"{name} row {first + done}")
            done += 1
            yield sample
    except Unreachable:
        raise
    except damage():
        pass
    for lost in range(done, min(rows, done + MAX_LOST_ROWS)):
        yield Sample(key=f"{name} row {first + lost}", problem="parquet_broken")


def open_parquet(file: File) -> Any:
    """Open a file without reading whole columns ahead; raises one of `damage()` if it is not Parquet."""
    parquet = require("pyarrow.parquet", extra="preprocessing")
    check_footer(file)
    return parquet.ParquetFile(
        file, pre_buffer=False, buffer_size=2**20, page_checksum_verification=True, arrow_extensions_enabled=False
    )


def damage() -> tuple[type[Exception], ...]:
    """The errors that reading a damaged file raises."""
    pa = require("pyarrow", extra="preprocessing")
    return (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError)


def kind_of(column_type: Any) -> Kind:
    types = require("pyarrow", extra="preprocessing").types
    if types.is_struct(column_type):
        has_bytes = any(field.name == "bytes" and types.is_binary(field.type) for field in column_type)
        return "picture" if has_bytes else "other"
    return "bytes" if types.is_binary(column_type) or types.is_large_binary(column_type) else "other"


def text_of(column: Any) -> Any:
    """The value in a column of one row; text and bytes as bytes, at most MAX_CAPTION_BYTES of them. Text that is not
    UTF-8 thus loses only the wrong bytes, not its row."""
    pa = require("pyarrow", extra="preprocessing")
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    value = column[0]
    if not (value.is_valid and isinstance(value, pa.BinaryScalar)):
        return value.as_py()
    return value.as_buffer()[:MAX_CAPTION_BYTES].to_pybytes()
