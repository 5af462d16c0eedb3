"""Where pictures with captions come from.

A source is a fixed sequence of samples cut into parts; one part becomes one shard, so a part can be read again, alone,
at any time, and gives the same samples. A new kind of source is one class with the members of `Source`.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeVar

from dalle_lean.pictures import PICTURE_SUFFIXES, read_picture

CAPTION_COLUMNS = ("text", "caption")
MAX_CAPTION_BYTES = 64 * 2**10

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One picture as it was found, nothing decoded yet. Key and caption are made valid UTF-8."""

    key: str
    """Names the picture within its source."""
    caption: str | None = None
    picture: bytes = b""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else the source says, unchecked: NSFW, url, original_width, original_height."""
    problem: str | None = None
    """Why the source has no picture to give, such as "picture_missing"."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", utf8(self.key))
        object.__setattr__(self, "caption", None if self.caption is None else utf8(self.caption))


class Source(Protocol):
    """Pictures with captions in a fixed order, cut into parts."""

    @property
    def part_sizes(self) -> Sequence[int]:
        """Number of samples of each part."""

    def samples(self, part: int) -> Iterator[Sample]:
        """Read one part, lazily and in order."""

    def fingerprint(self) -> str:
        """Equal for the same samples in the same order: tells a changed source from the one a run began with."""


def open_source(path: str | Path, part_rows: int) -> Source:
    """The source at `path`, cut into parts of `part_rows` samples; ValueError where there is nothing to read."""
    path = Path(path)
    if part_rows < 1:
        raise ValueError(f"part_rows={part_rows}: must be positive")
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder; a source is a folder of pictures with captions")
    if (path / "metadata.jsonl").is_file():
        return ListedFolder(path, part_rows)
    if nested := sorted(str(listing.parent) for listing in path.glob("*/metadata.jsonl")):
        # Splits such as held-out pictures must not be swept up by naming their parent.
        raise ValueError(f"{path} has no metadata.jsonl, but folders in it have one: take one of {', '.join(nested)}")
    return CaptionedFolder(path, part_rows)


class ListedFolder:
    """Pictures listed in `metadata.jsonl` as `datasets`' ImageFolder has it, in the order of its lines.

    Each line is an object with `file_name` (below the folder), the caption under `text` or `caption`, and optionally
    `key`, `url`, `NSFW`, `original_width`, `original_height`. A line that is not becomes a sample with a problem.
    """

    def __init__(self, folder: Path, part_rows: int):
        self.folder = folder
        self.part_rows = part_rows
        # Lines are parsed when their turn comes.
        lines = (folder / "metadata.jsonl").read_bytes().split(b"\n")
        self.numbered_lines = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        if not self.numbered_lines:
            raise ValueError(f"{folder / 'metadata.jsonl'} lists no picture")

    @property
    def part_sizes(self) -> list[int]:
        return part_sizes(len(self.numbered_lines), self.part_rows)

    def samples(self, part: int) -> Iterator[Sample]:
        for number, line in cut(self.numbered_lines, part, self.part_rows):
            yield self.sample(number, line)

    def sample(self, number: int, line: bytes) -> Sample:
        key = f"metadata.jsonl line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return Sample(key=key, problem="metadata_broken")
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            return Sample(key=key, problem="metadata_broken")
        name = row["file_name"]
        key = str(row.get("key") or name)
        caption = next((row[column] for column in CAPTION_COLUMNS if isinstance(row.get(column), str)), None)
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            return Sample(key=key, caption=caption, problem="picture_outside_folder")
        picture, problem = read_picture(self.folder / name)
        return Sample(key=key, caption=caption, picture=picture, metadata=row, problem=problem)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for _, line in self.numbered_lines:
            name = self.picture_name(line)
            digest.update(repr((line, None if name is None else file_size(self.folder / name))).encode())
        return digest.hexdigest()

    def picture_name(self, line: bytes) -> str | None:
        """The file that a line names, if it names one."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return row["file_name"] if isinstance(row, dict) and isinstance(row.get("file_name"), str) else None


class CaptionedFolder:
    """Every picture below a folder in the order of their names, each captioned by the .txt of the same name beside it.

    The caption is the whole text with blanks and line ends run together; without a .txt it is None.
    """

    def __init__(self, folder: Path, part_rows: int):
        self.folder = folder
        self.part_rows = part_rows
        files = (path for path in folder.rglob("*") if path.suffix.lower() in PICTURE_SUFFIXES)
        self.names = sorted(path.relative_to(folder).as_posix() for path in files)
        if not self.names:
            raise ValueError(f"{folder} holds no pictures and no metadata.jsonl")

    @property
    def part_sizes(self) -> list[int]:
        return part_sizes(len(self.names), self.part_rows)

    def samples(self, part: int) -> Iterator[Sample]:
        for name in cut(self.names, part, self.part_rows):
            picture, problem = read_picture(self.folder / name)
            caption = read_caption((self.folder / name).with_suffix(".txt"))
            yield Sample(key=name, caption=caption, picture=picture, problem=problem)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in self.names:
            path = self.folder / name
            digest.update(repr((name, file_size(path), read_caption(path.with_suffix(".txt")))).encode())
        return digest.hexdigest()


def file_size(path: Path) -> int | None:
    """Size in bytes, None where there is no file: tells most replaced pictures, and copies of a source are alike."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return None


def utf8(text: str) -> str:
    """`text` with what UTF-8 cannot hold (lone surrogates) replaced."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def part_sizes(num_samples: int, part_rows: int) -> list[int]:
    return [min(part_rows, num_samples - start) for start in range(0, num_samples, part_rows)]


def cut(entries: Sequence[T], part: int, part_rows: int) -> Sequence[T]:
    return entries[part * part_rows : (part + 1) * part_rows]


def read_caption(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CAPTION_BYTES)
    except OSError:
        return None
    return " ".join(text.decode("utf-8-sig", errors="replace").split())
