"""Parquet with the pictures' bytes in it: img2dataset's, `datasets`', and the like."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from dalle_lean.io.parquet_footer import check_footer
from dalle_lean.io.remote_errors import Unreachable
from dalle_lean.require import require
from preprocessing.sources.columns import Columns, Kind, find_columns
from preprocessing.sources.files import File, files_fingerprint, is_remote, part_names
from preprocessing.sources.parquet_pages import check_pages
from preprocessing.sources.sample import MAX_CAPTION_BYTES, Sample

BATCH_BYTES = 2**24
MAX_BATCH_ROWS = 256
MAX_LOST_ROWS = 2**20
"""A row group that cannot be read counts as at most so many samples, whatever a damaged footer says."""


class ParquetShards:
    """Parquet files of pictures, captions and metadata; each file is a part.

    Some rows at a time are in memory, and at least one page of the file. The rows of a row group that cannot be read
    are samples with the problem "parquet_broken", and so is, as one, a file without a sound footer; other row groups
    are read.
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
        """Refuse a table whose columns cannot be told, by the first file that can be read; see `find_columns`."""
        for path in self.paths:
            try:
                with File(path) as file:
                    schema = open_parquet(file).schema_arrow
            except Unreachable:
                raise
            except damage():
                continue
            try:
                self.columns(schema)
            except ValueError as error:
                raise type(error)(f"{path}: {error}") from None
            return

    def columns(self, schema: Any) -> Columns:
        kinds = {field.name: kind_of(field.type) for field in schema}
        return find_columns(kinds, picture=self.picture_column, caption=self.caption_column)

    def samples(self, part: int) -> Iterator[Sample]:
        path = self.paths[part]
        name = PurePosixPath(path).name
        try:
            with File(path) as file:
                table = open_parquet(file)
                columns = self.columns(table.schema_arrow)
                first = 0
                for group in range(table.num_row_groups):
                    yield from read_group(file, table, group, columns, name, first)
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


def read_group(file: File, table: Any, group: int, columns: Columns, name: str, first: int) -> Iterator[Sample]:
    """The samples of one row group, whose first row is row `first` of the file `name`."""
    pa = require("pyarrow", extra="preprocessing")
    metadata = table.metadata.row_group(group)
    rows = metadata.num_rows
    batch_rows = min(MAX_BATCH_ROWS, BATCH_BYTES * rows // max(1, metadata.total_byte_size))
    selected = [
        f"{column}.bytes" if pa.types.is_struct(table.schema_arrow.field(column).type) else column
        for column in columns.names
    ]
    done = 0
    try:
        for column in (metadata.column(index) for index in range(metadata.num_columns)):
            if column.path_in_schema.split(".")[0] in columns.names:
                starts = [column.data_page_offset, column.dictionary_page_offset or column.data_page_offset]
                stop = min(starts) + column.total_compressed_size
                dictionary_bytes = check_pages(file, min(starts), stop, column.total_uncompressed_size)
                batch_rows = min(batch_rows, BATCH_BYTES // max(1, dictionary_bytes))
                if "DELTA_BYTE_ARRAY" in column.encodings:  # a value may repeat the one before it, at no cost
                    batch_rows = 1
        for batch in table.iter_batches(max(1, batch_rows), row_groups=[group], columns=selected, use_threads=False):
            values = {column: as_bytes(batch.column(column)) for column in columns.names}
            for row in range(batch.num_rows):
                found = {
                    column: cells[row].as_py() if column == columns.picture else beginning(cells[row])
                    for column, cells in values.items()
                }
                sample = columns.sample(found, f"{name} row {first + done}")
                done += 1
                yield sample
    except Unreachable:
        raise
    except damage():
        pass
    for row in range(done, min(rows, done + MAX_LOST_ROWS)):
        yield Sample(key=f"{name} row {first + row}", problem="parquet_broken")


def open_parquet(file: File) -> Any:
    """Open without reading ahead whole columns; one of `damage()` where it is no Parquet."""
    parquet = require("pyarrow.parquet", extra="preprocessing")
    check_footer(file)
    return parquet.ParquetFile(
        file, pre_buffer=False, buffer_size=2**20, page_checksum_verification=True, arrow_extensions_enabled=False
    )


def damage() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    pa = require("pyarrow", extra="preprocessing")
    return (pa.ArrowException, OSError, ValueError, TypeError, KeyError, OverflowError, MemoryError)


def kind_of(column_type: Any) -> Kind:
    types = require("pyarrow", extra="preprocessing").types
    if types.is_struct(column_type):
        has_bytes = any(field.name == "bytes" and types.is_binary(field.type) for field in column_type)
        return "picture" if has_bytes else "other"
    return "bytes" if types.is_binary(column_type) or types.is_large_binary(column_type) else "other"


def beginning(scalar: Any) -> Any:
    """A value of Arrow's, of bytes only as many as a caption is read of: it may have gigabytes."""
    pa = require("pyarrow", extra="preprocessing")
    if not (scalar.is_valid and isinstance(scalar, pa.BinaryScalar)):  # text is bytes here, see `as_bytes`
        return scalar.as_py()
    return scalar.as_buffer()[:MAX_CAPTION_BYTES].to_pybytes()


def as_bytes(column: Any) -> Any:
    """Text as its bytes: of text that is not UTF-8 only the wrong bytes are lost, not the row."""
    pa = require("pyarrow", extra="preprocessing")
    if pa.types.is_string(column.type):
        return column.cast(pa.binary())
    return column.cast(pa.large_binary()) if pa.types.is_large_string(column.type) else column
