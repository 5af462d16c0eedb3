"""Shards of VQGAN codes: the one writer and the one reader.

A shard is a Parquet file with Brotli and the columns of the published data set laion/laion_100m_vqgan_f8. Beside the
shards, `dataset.json` says what the codes mean and what was counted; a folder without it is not finished.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dalle_lean.files import atomic_write, read_json, sha256_file, write_json
from dalle_lean.require import require

if TYPE_CHECKING:
    import datasets

FORMAT = "dalle_lean_shards/1"
MAX_CODEBOOK_SIZE = 2**15
"""Codes are stored as int16."""
READ_ROWS = 256
SHA256 = re.compile(r"[0-9a-f]{64}")
SHARD_NAME = re.compile(r"[\w-][\w.-]*\.parquet")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One picture with its caption, as stored."""

    caption: str
    codes: NDArray[np.int16]
    """[I] in raster order."""
    nsfw: str | None
    original_width: int
    original_height: int
    url: str | None
    key: str


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard file of a folder."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Pictures of the source: every one is kept or rejected for one reason."""

    seen: int = 0
    kept: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    further_views: int = 0
    """Rows beyond one for each picture that was kept: more crops, mirror images."""


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What `dataset.json` says."""

    vqgan: str
    """Fingerprint of the VQGAN that made the codes."""
    image_side: int
    """Codes along one side of a picture."""
    codebook_size: int
    picture_side: int
    """Pixels along one side of a picture."""
    counts: Counts
    shards: tuple[Shard, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else decided the content of the shards."""

    @property
    def num_codes(self) -> int:
        """Codes of one picture."""
        return self.image_side**2


def write_shard(path: Path, rows: Sequence[Row]) -> Shard:
    """Write one shard atomically; the same rows give the same bytes."""
    pa = require("pyarrow", extra="preprocessing")
    parquet = require("pyarrow.parquet", extra="preprocessing")
    columns = {
        "caption": pa.array([row.caption for row in rows], pa.string()),
        "code": pa.array([row.codes.astype("<i2").tobytes() for row in rows], pa.binary()),
        "NSFW": pa.array([row.nsfw for row in rows], pa.string()),
        "original_width": pa.array([row.original_width for row in rows], pa.int32()),
        "original_height": pa.array([row.original_height for row in rows], pa.int32()),
        "url": pa.array([row.url for row in rows], pa.string()),
        "key": pa.array([row.key for row in rows], pa.string()),
    }
    with atomic_write(path) as temporary:
        parquet.write_table(pa.table(columns), temporary, compression="brotli", use_dictionary=["NSFW"])
        return Shard(file=path.name, rows=len(rows), sha256=sha256_file(temporary))


def write_dataset_info(folder: Path, info: DatasetInfo) -> None:
    write_json(folder / "dataset.json", {"format": FORMAT, **asdict(info)})


def read_dataset_info(folder: str | Path) -> DatasetInfo:
    """Read and check `dataset.json`; ValueError says what is wrong with it, or which shard is not there."""
    folder = Path(folder)
    path = folder / "dataset.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no dataset.json: it is no finished output of dalle-lean preprocess")
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: not of format {FORMAT}")
    try:
        info = parse_dataset_info(content)
    except KeyError as error:
        raise ValueError(f"{path}: no field {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    for shard in info.shards:
        if not (folder / shard.file).is_file():
            raise ValueError(f"{folder}: {shard.file}, named by dataset.json, is not there")
    return info


def parse_dataset_info(content: Mapping[str, Any]) -> DatasetInfo:
    shards = tuple(
        Shard(
            file=text(shard, "file", SHARD_NAME),
            rows=number(shard, "rows", 1),
            sha256=text(shard, "sha256", SHA256),
        )
        for shard in content["shards"]
    )
    counts = Counts(
        seen=number(content["counts"], "seen", 1),
        kept=number(content["counts"], "kept", 1),
        rejected={reason: number(content["counts"]["rejected"], reason, 0) for reason in content["counts"]["rejected"]},
        further_views=number({"further_views": 0, **content["counts"]}, "further_views", 0),
    )
    rows = sum(shard.rows for shard in shards)
    if rows != counts.kept + counts.further_views:
        raise ValueError(f"kept={counts.kept}, but the shards have {rows} rows (further_views={counts.further_views})")
    settings = content.get("settings", {})
    if not isinstance(settings, dict):
        raise ValueError(f"settings={settings!r}: must be an object")
    return DatasetInfo(
        vqgan=text(content, "vqgan", SHA256),
        image_side=number(content, "image_side", 1),
        codebook_size=number(content, "codebook_size", 2, MAX_CODEBOOK_SIZE),
        picture_side=number(content, "picture_side", 1),
        counts=counts,
        shards=shards,
        settings=settings,
    )


def number(content: Mapping[str, Any], name: str, low: int, high: int = 2**63) -> int:
    value = content[name]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must be an integer from {low} to {high}")
    return value


def text(content: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = content[name]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{name}={value!r}: must look like {pattern.pattern}")
    return value


def open_stream(folder: str | Path) -> "datasets.IterableDataset":
    """Stream a folder of shards: {"caption": str, "codes": int16 array [I], "key": str}, shard after shard.

    The stream can be shuffled, split by shard and resumed as `datasets` does it. Codes are checked as they are read:
    a damaged shard, or codes of another length or range, is a ValueError that names the shard.
    """
    info = read_dataset_info(folder)
    paths = [str(Path(folder) / shard.file) for shard in info.shards]
    return open_files(paths, num_codes=info.num_codes, codebook_size=info.codebook_size)


def open_files(paths: Sequence[str], *, num_codes: int, codebook_size: int) -> "datasets.IterableDataset":
    """As `open_stream`, for local Parquet files of the published layout that have no `dataset.json` beside them."""
    datasets = require("datasets", extra="preprocessing")
    require("pyarrow.parquet", extra="preprocessing")
    # `datasets` splits and shuffles by the list of paths.
    arguments = {"paths": list(paths), "num_codes": num_codes, "codebook_size": codebook_size}
    return datasets.IterableDataset.from_generator(read_rows, gen_kwargs=arguments)


def read_rows(paths: Sequence[str], num_codes: int, codebook_size: int) -> Iterator[dict[str, Any]]:
    """The rows of some shards, one after the other, checked; see `open_stream`."""
    pa = require("pyarrow", extra="preprocessing")
    parquet = require("pyarrow.parquet", extra="preprocessing")
    for path in paths:
        first = 0
        try:
            with parquet.ParquetFile(path) as file:
                columns = [name for name in ("caption", "code", "key") if name in file.schema_arrow.names]
                for batch in file.iter_batches(batch_size=READ_ROWS, columns=columns):
                    captions = batch.column("caption").to_pylist()
                    codes = decode_codes(batch.column("code").to_pylist(), num_codes, codebook_size)
                    keys = batch.column("key").to_pylist() if "key" in columns else range(first, first + len(captions))
                    if not all(isinstance(caption, str) for caption in captions):
                        raise ValueError(f"a caption among rows {first} to {first + len(captions) - 1} is missing")
                    for caption, row, key in zip(captions, codes, keys, strict=True):
                        # A copy: a row waiting in a shuffle buffer must not hold its whole batch.
                        yield {"caption": caption, "codes": row.copy(), "key": str(key)}
                    first += len(captions)
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise ValueError(f"{path} is damaged or no shard: {error}") from None


def decode_codes(values: Sequence[bytes], num_codes: int, codebook_size: int) -> NDArray[np.int16]:
    """int16 little-endian bytes, one value a picture -> codes [len(values), num_codes]."""
    for value in values:
        if len(value) != 2 * num_codes:
            raise ValueError(f"a picture has {len(value)} bytes of codes; must be {2 * num_codes}")
    codes = np.frombuffer(b"".join(values), dtype="<i2").reshape(len(values), num_codes)
    if codes.size and not 0 <= codes.min() <= codes.max() < codebook_size:
        raise ValueError(f"codes {codes.min()}..{codes.max()}; must be in 0..{codebook_size - 1}")
    return codes
