"""Data sets of the `datasets` library: streamed by name or path, or saved with `save_to_disk`."""

import hashlib
import logging
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.images.files import MAX_PICTURE_BYTES
from dalle_lean.io.remote_io import Unreachable, storage_of
from dalle_lean.require import require
from preprocessing.sources.columns import Columns, Kind, find_columns
from preprocessing.sources.files import files_fingerprint, is_remote
from preprocessing.sources.sample import NumberedParts, Sample, numbered


class StreamedDataset:
    """A data set streamed from the hub or from files without downloading it whole; each of its shards is a part.

    `name` is "owner/name" or a path, `config` a subset and `split` a split of it. Pictures are in a column of
    `datasets`' Image type, or of bytes. The rest of a damaged shard is one sample with the problem "dataset_broken".
    Raises UserError if there is no such data set, or none of its columns is known to hold pictures.
    """

    def __init__(
        self,
        name: str,
        *,
        config: str | None = None,
        split: str = "train",
        picture_column: str | None = None,
        caption_column: str | None = None,
    ):
        self.name = name
        self.config = config
        self.split = split
        self.revision: str | None = None
        stream = self.open()
        files = self.files()
        if files and files[0].startswith("hf://"):  # hf://datasets/owner/name@commit/file
            self.revision = files[0].partition("@")[2].partition("/")[0] or None
        self.parts = numbered(int(stream.num_shards))
        self.columns = columns_of(stream, name, picture_column, caption_column)

    def size(self, part: int) -> None:
        return None

    def samples(self, part: int) -> Iterator[Sample]:
        stream, files = undecoded(self.open().shard(len(self.parts), part), self.columns), frozenset(self.files())
        rows = (with_picture(row, self.columns.picture, files) for row in stream)
        return read_rows(rows, self.columns, f"{self.parts[part]} row", 0, remote=any(map(is_remote, files)))

    def fingerprint(self) -> str:
        files = self.files()
        if files and files[0].startswith("hf://"):
            return hashlib.sha256(repr(files).encode()).hexdigest()  # the addresses hold the commit
        return files_fingerprint(files)

    def open(self) -> Any:
        try:
            return builder(self.name, self.config, self.revision).as_streaming_dataset(self.split)
        except (ValueError, FileNotFoundError, RuntimeError) as error:  # the last for data sets that are programs
            raise UserError(f"{self.name}: cannot be read as a data set: {error}") from None

    def files(self) -> list[str]:
        files = builder(self.name, self.config, self.revision).config.data_files or {}
        return [str(file) for file in files.get(self.split, ())]


class SavedDataset(NumberedParts):
    """A folder written by `datasets`' `save_to_disk`, cut into parts of `part_rows` rows."""

    def __init__(
        self, folder: Path, part_rows: int, *, picture_column: str | None = None, caption_column: str | None = None
    ):
        self.folder = folder
        try:
            table = saved(folder)
        except Exception as error:  # `datasets` raises nearly anything on damaged files
            raise UserError(f"{folder}: cannot be read as a saved data set: {error}") from None
        self.columns = columns_of(table, str(folder), picture_column, caption_column)
        if not len(table):
            raise UserError(f"{folder}: the data set is empty")
        super().__init__(len(table), part_rows)

    def samples(self, part: int) -> Iterator[Sample]:
        rows = self.rows(part)
        table = undecoded(saved(self.folder).select(rows), self.columns)
        return read_rows(table, self.columns, "row", rows.start)

    def fingerprint(self) -> str:
        return files_fingerprint([str(path) for path in sorted(self.folder.glob("*.arrow"))])


@lru_cache(maxsize=4)
def builder(name: str, config: str | None, revision: str | None) -> Any:
    """A data set's builder, cached because making one takes several requests to the hub."""
    datasets = require("datasets", extra="preprocessing")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns of every retry
    return datasets.load_dataset_builder(name, config, revision=revision)


@lru_cache(maxsize=4)
def saved(folder: Path) -> Any:
    return require("datasets", extra="preprocessing").load_from_disk(str(folder))


def columns_of(dataset: Any, name: str, picture: str | None, caption: str | None) -> Columns:
    if dataset.features is not None:
        kinds = {column: kind_of(feature) for column, feature in dataset.features.items()}
    else:
        first: dict[str, Any] = next(iter(dataset), {})
        kinds = {column: "bytes" if isinstance(value, bytes) else "other" for column, value in first.items()}
    return find_columns(name, kinds, picture, caption)


def kind_of(feature: Any) -> Kind:
    datasets = require("datasets", extra="preprocessing")
    if isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature):
        return "picture"
    return "bytes" if getattr(feature, "dtype", None) in ("binary", "large_binary") else "other"


def undecoded(dataset: Any, columns: Columns) -> Any:
    """The data set with only the columns in use, and pictures left as bytes."""
    datasets = require("datasets", extra="preprocessing")
    dataset = dataset.select_columns(columns.names)
    if dataset.features is not None and isinstance(dataset.features[columns.picture], datasets.Image):
        dataset = dataset.cast_column(columns.picture, datasets.Image(decode=False))
    return dataset


def with_picture(row: Mapping[str, Any], column: str, files: Collection[str]) -> Mapping[str, Any]:
    """The row with its picture's bytes, where the row names one of the data set's own `files`, or a file in one of them
    that is a zip archive. Any other path is left alone: a table could name files of this machine. So is a row whose
    picture is not there or damaged."""
    picture = row.get(column)
    path = picture.get("path") if isinstance(picture, Mapping) and picture.get("bytes") is None else None
    member, _, name = str(path).rpartition("::")
    if name not in files or (member and not member.startswith("zip://")):
        return row
    try:
        with archive(name).open(member.removeprefix("zip://")) if member else opened(name) as file:
            return {**row, column: file.read(MAX_PICTURE_BYTES + 1)}
    except (FileNotFoundError, KeyError, zipfile.BadZipFile, zlib.error):
        return row


def opened(name: str) -> Any:
    files, path = storage_of(name)
    return files.open(path, "rb")


@lru_cache(maxsize=2)
def archive(name: str) -> zipfile.ZipFile:
    """An open archive, whose directory is read only once."""
    return zipfile.ZipFile(opened(name))


def read_rows(
    rows: Iterable[Any], columns: Columns, place: str, first: int, *, remote: bool = False
) -> Iterator[Sample]:
    """The samples of rows; Unreachable if `remote` ones cannot be read and nothing shows that they are damaged."""
    pa = require("pyarrow", extra="preprocessing")
    number = first
    try:
        for row in rows:
            yield columns.sample(row, f"{place} {number}")
            number += 1
    except Exception as error:  # `datasets` raises nearly anything on damaged files, and so do HTTP libraries
        damaged = isinstance(error, (pa.ArrowException, ValueError)) and not isinstance(error, OSError)
        if remote and not damaged:
            raise Unreachable(f"{place} {number}: {type(error).__name__}: {error}") from error
        yield Sample(key=f"{place} {number}", problem="dataset_broken")
