"""Reads and writes shards of VQGAN codes.

A shard is a Parquet file, compressed with Brotli, with the columns of the data set laion/laion_100m_vqgan_f8; `code`
holds the codes of a picture as int16, little-endian, in raster order. The codes of R rows, I a picture, are an array
[R, I], or [R, 0] if they were not requested.

Beside the shards, `dataset.json` holds the meaning of the codes and the counts (`preprocessing.shards.manifest`); a
folder without it is not finished.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write, sha256_file
from dalle_lean.io.parquet_footer import check_footer
from dalle_lean.io.remote_io import Unreachable
from dalle_lean.require import require
from dalle_lean.tokenizer import MOST_CHARACTERS
from preprocessing.shards.manifest import Shard

COLUMNS = ("caption", "code", "NSFW", "original_width", "original_height", "url", "key")
BROTLI_LEVEL = 11  # the highest: a shard is written once and read often
READ_ROWS = 256
VQGAN_NOTE = b"dalle_lean_vqgan"


class DamagedShard(UserError):
    """A shard cannot be read, or does not hold what its data set says."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One picture with its caption, as stored."""

    caption: str
    codes: NDArray[np.int16]  # [I] in raster order
    nsfw: str | None
    original_width: int
    original_height: int
    url: str | None
    key: str


@dataclass(frozen=True, eq=False)
class Rows:
    """Captions, codes and keys of some rows of shards."""

    captions: list[str]
    codes: NDArray[np.int16]
    keys: list[str]

    @classmethod
    def none(cls) -> Self:
        return cls([], np.empty((0, 0), np.int16), [])

    def __len__(self) -> int:
        return len(self.captions)

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> "Rows":
        return Rows([self.captions[i] for i in indices], self.codes[indices], [self.keys[i] for i in indices])

    def part(self, start: int, end: int) -> "Rows":
        """The rows start..end-1, without copying the codes."""
        return Rows(self.captions[start:end], self.codes[start:end], self.keys[start:end])


def join(parts: Sequence[Rows]) -> Rows:
    """The rows of at least one part, in order."""
    parts = [part for part in parts if len(part)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    return Rows(
        [caption for part in parts for caption in part.captions],
        np.concatenate([part.codes for part in parts]),
        [key for part in parts for key in part.keys],
    )


class Header(NamedTuple):
    """What a shard says about itself."""

    rows: int
    columns: tuple[str, ...]
    vqgan: str | None  # fingerprint of the VQGAN that made the codes, if the shard stores it


def write_shard(path: Path, rows: Sequence[Row], *, vqgan: str | None = None) -> Shard:
    """Write one shard atomically; the same rows give the same bytes. `vqgan` is the fingerprint of the one that made
    the codes; the file stores it to reveal a shard in the wrong folder."""
    pa = require("pyarrow", extra="preprocessing")
    columns = {
        "caption": pa.array([row.caption for row in rows], pa.string()),
        "code": pa.array([row.codes.astype("<i2").tobytes() for row in rows], pa.binary()),
        "NSFW": pa.array([row.nsfw for row in rows], pa.string()),
        "original_width": pa.array([row.original_width for row in rows], pa.int32()),
        "original_height": pa.array([row.original_height for row in rows], pa.int32()),
        "url": pa.array([row.url for row in rows], pa.string()),
        "key": pa.array([row.key for row in rows], pa.string()),
    }
    table = pa.table(columns)
    if vqgan is not None:
        table = table.replace_schema_metadata({VQGAN_NOTE: vqgan})
    return write_table(path, table)


def write_table(path: Path, table: Any) -> Shard:
    """Like `write_shard`, for an Arrow table with at least the columns of a shard."""
    parquet = require("pyarrow.parquet", extra="preprocessing")
    with atomic_write(path) as temporary:
        parquet.write_table(
            table, temporary, use_dictionary=["NSFW"], compression="brotli", compression_level=BROTLI_LEVEL
        )
        return Shard(file=path.name, rows=len(table), sha256=sha256_file(temporary))


@contextmanager
def naming_damage(path: str | Path) -> Iterator[None]:
    """Raise whatever goes wrong while a shard is read as a DamagedShard that names it; a lack of memory as a
    MemoryError that does; Unreachable as it is."""
    pa = require("pyarrow", extra="preprocessing")
    try:
        yield
    except Unreachable:
        raise
    except MemoryError as error:  # pyarrow's is an ArrowException too
        raise MemoryError(f"not enough memory to read {path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DamagedShard(f"{path} is damaged or no shard: {' '.join(str(error).split())}") from None


def shard_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a shard; DamagedShard if it cannot be read."""
    with naming_damage(path):
        return sha256_file(path)


@contextmanager
def open_shard(path: str | Path) -> Iterator[Any]:
    """Open a shard as a pyarrow ParquetFile; DamagedShard for whatever goes wrong while it is open, in the caller's
    block too: only read there."""
    parquet = require("pyarrow.parquet", extra="preprocessing")
    with naming_damage(path):
        with open(path, "rb") as file:
            check_footer(file)
        with parquet.ParquetFile(path) as table:
            yield table


def read_header(path: str | Path) -> Header:
    """Rows, columns and VQGAN of a shard; DamagedShard if it is no Parquet file with codes."""
    with open_shard(path) as file:
        check_columns(file)
        note = (file.schema_arrow.metadata or {}).get(VQGAN_NOTE)
        vqgan = None if note is None else note.decode("ascii", errors="replace")
        return Header(file.metadata.num_rows, tuple(file.schema_arrow.names), vqgan)


def check_columns(file: Any) -> None:
    """UserError if an open Parquet file has no captions or no codes."""
    names = file.schema_arrow.names
    for name in ("caption", "code"):
        if name not in names:
            raise UserError(f"it has no column {name}, only {', '.join(names)}")


def code_batches(file: Any, *, columns: Sequence[str] = ("caption", "code", "key"), **options: Any) -> Iterator[Any]:
    """Record batches of an open Parquet file, as pyarrow's `iter_batches` gives them. Skips `columns` that the file
    does not have; UserError if it has no captions or no codes."""
    check_columns(file)
    yield from file.iter_batches(columns=columns, **options)


def read_blocks(path: str | Path, num_codes: int, codebook_size: int) -> Iterator[Rows]:
    """The checked rows of a shard, some at a time; raises DamagedShard."""
    first = 0
    with open_shard(path) as file:
        for batch in code_batches(file, batch_size=READ_ROWS):
            yield decode_rows(batch, range(first, first + len(batch)), num_codes, codebook_size)
            first += len(batch)
        if first != file.metadata.num_rows:
            raise UserError(f"it has {first} of its {file.metadata.num_rows} rows")


def decode_rows(
    table: Any, numbers: Sequence[int], num_codes: int, codebook_size: int, *, with_codes: bool = True
) -> Rows:
    """Check and decode an Arrow table or batch whose row i is row `numbers[i]` of its shard, without its codes unless
    `with_codes`. UserError for a missing caption or for codes of the wrong length or range."""
    pa = require("pyarrow", extra="preprocessing")
    captions = table.column("caption")
    if pa.types.is_string(captions.type) or pa.types.is_large_string(captions.type):
        # A caption may be gigabytes long; no more of it is ever used.
        captions = require("pyarrow.compute", extra="preprocessing").utf8_slice_codeunits(captions, 0, MOST_CHARACTERS)
    captions = captions.to_pylist()
    if not all(isinstance(caption, str) for caption in captions):
        raise UserError(f"a caption among rows {numbers[0]} to {numbers[-1]} is missing")
    codes = np.empty((len(captions), 0), np.int16)
    if with_codes:
        codes = decode_codes(table.column("code").to_pylist(), num_codes, codebook_size)
    return Rows(captions, codes, keys_of(table, numbers))


def keys_of(table: Any, numbers: Sequence[int]) -> list[str]:
    """The keys of an Arrow table or batch; if it has none, the numbers of its rows in the shard."""
    return [str(key) for key in (table.column("key").to_pylist() if "key" in table.schema.names else numbers)]


def decode_codes(values: Sequence[bytes], num_codes: int, codebook_size: int) -> NDArray[np.int16]:
    """Codes [len(values), num_codes] from int16 little-endian bytes, a value for each picture."""
    for value in values:
        if len(value) != 2 * num_codes:
            raise UserError(f"a picture has {len(value)} bytes of codes; must be {2 * num_codes}")
    codes = np.frombuffer(b"".join(values), dtype="<i2").reshape(len(values), num_codes)
    if codes.size and not 0 <= codes.min() <= codes.max() < codebook_size:
        raise UserError(f"codes {codes.min()}..{codes.max()}; must be in 0..{codebook_size - 1}")
    return codes
