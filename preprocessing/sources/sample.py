"""Samples, and the protocol of sources.

A source is a fixed sequence of samples cut into parts. Each part becomes one shard: it can be read by itself, again, at
any time and on any machine, and yields the same samples.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dalle_lean.words import utf8

CAPTION_NAMES = ("text", "caption", "TEXT", "txt")
KEY_NAMES = ("key", "__key__")
METADATA_NAMES = {
    "NSFW": ("NSFW", "nsfw"),
    "url": ("url", "URL"),
    "original_width": ("original_width",),
    "original_height": ("original_height",),
}
MAX_CAPTION_BYTES = 64 * 2**10  # the rest of a longer caption is not read
MAX_TEXT_BYTES = 2**20  # of a line, a .txt or a .json
SCALARS = (str, int, float, bytes)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One picture as found, not yet decoded. Key and caption are made valid UTF-8."""

    key: str  # names the picture within its source
    caption: str | None = None
    picture: bytes = b""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """NSFW, url, original_width and original_height, if the source has them, as any text or number."""
    problem: str | None = None
    """Why there is no picture, such as "picture_missing"."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", utf8(self.key))
        object.__setattr__(self, "caption", None if self.caption is None else utf8(self.caption))

    def text(self, name: str) -> str | None:
        """Metadata as valid UTF-8; None if there is none, or it is empty."""
        value = self.metadata.get(name)
        return None if value is None or value == "" else utf8(str(value))


class Source(Protocol):
    """Pictures with captions in a fixed order, cut into parts. Sources hold no open files and can be pickled: worker
    processes and other machines each read some of the parts."""

    @property
    def parts(self) -> Sequence[str]:
        """A name for each part: unique, the same every time, safe in a file name."""

    def size(self, part: int) -> int | None:
        """Number of samples in a part; None if it takes reading the part to know."""

    def samples(self, part: int) -> Iterator[Sample]:
        """Read one part, lazily and in order, the same every time. Whatever is damaged becomes a sample with a problem.
        An OSError means that a remote storage failed despite retries: try the part again later."""

    def fingerprint(self) -> str:
        """Equal for the same samples in the same order, to tell whether a source has changed since a run began."""


class NumberedParts:
    """Parts of a source whose number of samples is known: `part_rows` samples each, the rest in the last."""

    def __init__(self, num_samples: int, part_rows: int):
        self.num_samples = num_samples
        self.part_rows = part_rows
        self.parts = numbered(-(-num_samples // part_rows))

    def rows(self, part: int) -> range:
        return range(part * self.part_rows, min((part + 1) * self.part_rows, self.num_samples))

    def size(self, part: int) -> int:
        return len(self.rows(part))


def numbered(parts: int) -> list[str]:
    """Names for this many parts."""
    return [f"{part:05d}" for part in range(parts)]


def json_object(content: bytes) -> dict[str, Any] | None:
    """The JSON object in `content`; None if there is none."""
    try:
        row = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def scalar(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first text or number under one of the names; never a list, since a deeply nested one cannot be printed."""
    found = (row.get(name) for name in names)
    return next((value for value in found if isinstance(value, SCALARS) and value not in ("", b"")), None)


def caption_of(row: Mapping[str, Any]) -> str | None:
    return next((row[name] for name in CAPTION_NAMES if isinstance(row.get(name), str)), None)


def metadata_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a row that is kept with its picture, each under one spelling."""
    found = {ours: scalar(row, names) for ours, names in METADATA_NAMES.items()}
    return {name: value for name, value in found.items() if value is not None}
