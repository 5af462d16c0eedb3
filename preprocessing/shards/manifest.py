"""`dataset.json`: the meaning of the codes in a folder of shards, the counts, and the shards that belong to it.

A folder without it is not finished.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from dalle_lean.io.folder_config import perhaps_beside

FORMAT = "dalle_lean_shards/1"
NAME = "dataset.json"
MAX_CODEBOOK_SIZE = 2**15  # codes are stored as int16
MAX_IMAGE_SIDE = 2**10
"""Codes along one side of a picture: far beyond any VQGAN, and a row of them still fits in memory."""
MOST_MANIFEST_BYTES = 2**26
"""Of dataset.json: some 400,000 shards."""
SHARD_BYTES = 140
"""What dataset.json has about a shard of fewer than 10^10 rows besides its name."""
OTHER_BYTES = 2**20
"""Kept free in a new dataset.json for all that is not about a shard."""
ADOPTED = "adopted"
"""Setting of folders whose shards another program wrote."""
SHA256 = re.compile(r"[0-9a-f]{64}")
SHARD_NAME = re.compile(r"[\w-][\w.-]*\.parquet")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard file of a folder."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The pictures of a source: each is kept, or rejected for one reason."""

    seen: int = 0
    kept: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    further_views: int = 0  # rows beyond the first of each picture that was kept: more crops and mirror images


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """The content of `dataset.json`."""

    vqgan: str  # fingerprint of the VQGAN that made the codes
    image_side: int  # codes along one side of a picture
    codebook_size: int
    picture_side: int  # pixels along one side of a picture
    counts: Counts
    shards: tuple[Shard, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # everything else that affects the content of the shards

    @property
    def num_codes(self) -> int:
        """Codes in a picture."""
        return self.image_side**2

    @property
    def num_rows(self) -> int:
        """Rows of all shards together."""
        return sum(shard.rows for shard in self.shards)


def check_room(names: Iterable[str]) -> None:
    """UserError for more shards, or longer names of them, than dataset.json has room for."""
    left = MOST_MANIFEST_BYTES - OTHER_BYTES
    for number, name in enumerate(names):
        left -= SHARD_BYTES + len(name.encode())
        if left < 0:
            raise UserError(f"{NAME} has room for the first {number:,} of these shards only: make several folders")


def write_dataset_info(folder: Path, info: DatasetInfo) -> None:
    write_json(folder / NAME, {"format": FORMAT, **asdict(info)})


def read_dataset_info(folder: str | Path) -> DatasetInfo:
    """Read and check `dataset.json`; UserError says what is wrong with it, or which shard is missing."""
    folder = Path(folder)
    info = read_manifest(folder)
    for shard in info.shards:
        if not (folder / shard.file).is_file():
            raise UserError(f"{folder}: {shard.file}, which is in dataset.json, is missing")
    return info


def read_manifest(folder: Path) -> DatasetInfo:
    """Like `read_dataset_info`, without checking that the shards exist."""
    path = folder / NAME
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}{perhaps_beside(folder)}; name a folder of shards")
    if not path.is_file():
        raise UserError(
            f"{folder} has no dataset.json: it is not the finished output of dalle-lean preprocess "
            "(for published files, dalle-lean shards adopt writes one)"
        )
    return parse_manifest(read_json(path, MOST_MANIFEST_BYTES), path)


def parse_manifest(content: Any, path: str | Path) -> DatasetInfo:
    """Check the content of the `dataset.json` at `path`; UserError says what is wrong with it."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path}: not of format {FORMAT}")
    try:
        return parse_dataset_info(content)
    except KeyError as error:
        raise UserError(f"{path}: no field {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: {error}") from None


def parse_dataset_info(content: Mapping[str, Any]) -> DatasetInfo:
    """Check every field; raises KeyError, TypeError or ValueError."""
    shards = tuple(
        Shard(file=text(shard, "file", SHARD_NAME), rows=number(shard, "rows", 1), sha256=text(shard, "sha256", SHA256))
        for shard in content["shards"]
    )
    if twice := [name for name, times in Counter(shard.file for shard in shards).items() if times > 1]:
        raise UserError(f"shards: {', '.join(twice)} named more than once")
    rejected = content["counts"]["rejected"]
    if not isinstance(rejected, dict):
        raise UserError(f"rejected={rejected!r}: must be an object")
    counts = Counts(
        seen=number(content["counts"], "seen", 1),
        kept=number(content["counts"], "kept", 1),
        rejected={reason: number(rejected, reason, 0) for reason in rejected},
        further_views=number({"further_views": 0, **content["counts"]}, "further_views", 0),
    )
    rows = sum(shard.rows for shard in shards)
    if rows != counts.kept + counts.further_views:
        raise UserError(f"kept={counts.kept}, but the shards have {rows} rows (further_views={counts.further_views})")
    settings = content.get("settings", {})
    if not isinstance(settings, dict):
        raise UserError(f"settings={settings!r}: must be an object")
    return DatasetInfo(
        vqgan=text(content, "vqgan", SHA256),
        image_side=number(content, "image_side", 1, MAX_IMAGE_SIDE),
        codebook_size=number(content, "codebook_size", 2, MAX_CODEBOOK_SIZE),
        picture_side=number(content, "picture_side", 1),
        counts=counts,
        shards=shards,
        settings=settings,
    )


def number(content: Mapping[str, Any], name: str, low: int, high: int = 2**63) -> int:
    value = content[name]
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"{name}={value!r}: must be an integer from {low} to {high}")
    return value


def text(content: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = content[name]
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise UserError(f"{name}={value!r}: must look like {pattern.pattern}")
    return value
