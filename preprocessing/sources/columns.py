"""Tables of pictures: what each column holds, and rows as samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dalle_lean.errors import UserError
from dalle_lean.images.files import MAX_PICTURE_BYTES
from preprocessing.sources.sample import CAPTION_NAMES, KEY_NAMES, METADATA_NAMES, Sample, metadata_of, scalar

PICTURE_NAMES = ("image", "jpg", "jpeg", "png", "webp", "picture", "img", "bytes", "image_bytes")

Kind = Literal["picture", "bytes", "other"]  # what a column holds: pictures, bytes that may be pictures, or neither


class NoPictures(UserError):
    """A table without a known column of pictures."""


class OnlyAddresses(NoPictures):
    """A table with addresses of pictures instead of pictures."""


@dataclass(frozen=True)
class Columns:
    """Names of a table's columns. Pictures are bytes, or `datasets`' {"bytes", "path"} with bytes."""

    picture: str
    caption: str | None
    names: list[str]
    """Of all columns that are read: these, the key and the metadata."""

    def sample(self, row: Mapping[str, Any], place: str) -> Sample:
        """A row as a sample; `place` is its key if it has none."""
        key = as_text(scalar(row, KEY_NAMES))
        caption = as_text(row.get(self.caption)) if self.caption else None
        picture = row.get(self.picture)
        if isinstance(picture, Mapping):
            picture = picture.get("bytes")
        problem = None
        if not isinstance(picture, bytes):
            picture, problem = b"", "picture_missing"
        elif len(picture) > MAX_PICTURE_BYTES:
            picture, problem = b"", "file_too_large"
        metadata = {name: as_text(value) for name, value in metadata_of(row).items()}
        return Sample(
            key=place if key is None else str(key),
            caption=caption if isinstance(caption, str) else None,
            picture=picture,
            metadata=metadata,
            problem=problem,
        )


def find_columns(table: str, kinds: Mapping[str, Kind], picture: str | None, caption: str | None) -> Columns:
    """Find the columns of a table by their names and kinds. `picture` and `caption` name columns with unusual names.
    Raises NoPictures, or UserError if there is no column of that name; both name the `table`."""
    names, listed = list(kinds), ", ".join(kinds)
    for wanted in (picture, caption):
        if wanted is not None and wanted not in names:
            raise UserError(f"{table}: no column {wanted!r}; there are: {listed}")
    if picture is None:
        known = [name for name in PICTURE_NAMES if kinds.get(name, "other") != "other"]
        sure = [name for name in names if kinds[name] == "picture"]
        if not known and len(sure) != 1:
            kind = OnlyAddresses if any(name in names for name in METADATA_NAMES["url"]) else NoPictures
            raise kind(f"{table}: cannot tell which column holds the pictures; the columns are: {listed}")
        picture = (known or sure)[0]
    elif kinds[picture] == "other":
        raise NoPictures(f"{table}: the column {picture!r} does not hold pictures as bytes")
    if caption is None:
        caption = next((name for name in CAPTION_NAMES if name in names), None)
    read = {picture, caption, *KEY_NAMES, *(name for spellings in METADATA_NAMES.values() for name in spellings)}
    return Columns(picture, caption, [name for name in names if name in read])


def as_text(value: Any) -> Any:
    """Bytes decoded as UTF-8; other values unchanged."""
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
