"""Reads folders of pictures with captions or other labels."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.files import PICTURE_SUFFIXES, UnusablePicture, read_square
from dalle_lean.images.image_folder import LISTING, Line, Unusable, listed_file, parse_line
from dalle_lean.progress import OnProgress
from training.data.pixels import Pixels, fingerprint, in_file

CAPTION_FIELDS = ("text", "caption")

Attributes = dict[str, str]
"""Some fields of a listing's line, each value as JSON; fields that the line lacks are absent."""


@dataclass(frozen=True, eq=False)
class ImageTextPairs:
    """Pictures and their captions."""

    pixels: Pixels
    captions: list[str]  # or other labels
    skipped: Counter[str] = field(default_factory=Counter)
    """Unusable pictures or lines of the listing, counted by reason."""
    attributes: list[Attributes] = field(default_factory=list)  # of each picture; may be empty

    def __len__(self) -> int:
        return len(self.captions)

    def take(self, rows: Sequence[int]) -> "ImageTextPairs":
        """The pairs of these rows."""
        return replace(
            self,
            pixels=self.pixels.take(torch.tensor(rows, dtype=torch.int64)),
            captions=[self.captions[row] for row in rows],
            attributes=[self.attributes[row] for row in rows if self.attributes],
        )

    def subsample(self, most: int) -> "ImageTextPairs":
        """At most `most` of the pairs, evenly spaced."""
        return self.take(range(0, len(self), math.ceil(len(self) / most)))

    def digest(self) -> str:
        """SHA-256 of pictures, captions and attributes."""
        text = "\n".join(self.captions).encode("utf-8", "surrogatepass")
        listed = json.dumps(self.attributes, sort_keys=True).encode() if any(self.attributes) else b""
        return self.pixels.digest(text + listed)


def caption_of(entry: Line) -> str:
    """The caption of a line; raises Unusable if it has none."""
    caption = next((entry[name] for name in CAPTION_FIELDS if isinstance(entry.get(name), str)), "").strip()
    if not caption:
        raise Unusable("no caption")
    return caption


def read_picture(folder: Path, name: str, side: int) -> Tensor:
    """Read one picture as uint8 [3, side, side]; raises Unusable if that fails."""
    try:
        square = read_square(listed_file(folder, name), side)
    except UnusablePicture as error:
        raise Unusable(error.reason.replace("_", " ")) from None
    return torch.tensor(square).permute(2, 0, 1)


def read_captioned(
    folder: Path,
    side: int,
    on_progress: OnProgress | None = None,
    *,
    store: Path,
    fields: Sequence[str] = (),
    label_of: Callable[[Line], str] = caption_of,
    read: Callable[[Path, str, int], Tensor] = read_picture,
) -> ImageTextPairs:
    """Read a folder in the layout of `datasets`' ImageFolder: pictures, and a metadata.jsonl with file_name and text
    or caption.

    `dalle_lean.images.files` makes the pictures side x side. Unusable lines are counted by reason; ValueError if no
    line is usable.

    Args:
        store: file that keeps the decoded pictures for later calls.
        fields: of the lines, kept as `attributes`.
        label_of: extracts a line's label, stored in `captions`.
        read: (folder, file_name, side) -> uint8 [3, side, side].
    """
    listing = folder / LISTING
    if not listing.is_file():
        raise UserError(f"{folder} has no {LISTING}; list its pictures there, one line of JSON for each")
    lines = [line for line in listing.read_bytes().split(b"\n") if line.strip()]
    data = read_lines(folder, lines, side, on_progress, fields, label_of, read, store)
    if not len(data):
        raise UserError(f"{listing} has no usable line: {dict(data.skipped) or 'it is empty'}")
    return data


def read_pictures(folder: Path, side: int, on_progress: OnProgress | None = None, *, store: Path) -> ImageTextPairs:
    """Read all pictures below a folder in order of name, with empty captions; ValueError if none can be read. Arguments
    as for `read_captioned`."""
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in PICTURE_SUFFIXES)
    names = sorted(str(path.relative_to(folder)) for path in paths)
    lines = [json.dumps({"file_name": name}).encode() for name in names]
    data = read_lines(folder, lines, side, on_progress, (), lambda entry: "", read_picture, store)
    if not len(data):
        raise UserError(f"{folder}: no picture can be read: {dict(data.skipped) or 'there are none'}")
    return data


def read_lines(
    folder: Path,
    lines: Sequence[bytes],
    side: int,
    on_progress: OnProgress | None,
    fields: Sequence[str],
    label_of: Callable[[Line], str],
    read: Callable[[Path, str, int], Tensor],
    store: Path,
) -> ImageTextPairs:
    """Read the pictures of a listing's lines; arguments as for `read_captioned`."""
    skipped: Counter[str] = Counter()
    entries: list[Line] = []
    labels: list[str] = []
    for line in lines:
        try:
            entry = parse_line(line)
            labels.append(label_of(entry))
            entries.append(entry)
        except Unusable as reason:
            skipped[str(reason)] += 1

    def fill(pixels: Tensor) -> dict[str, Any]:
        used: list[int] = []
        unreadable: Counter[str] = Counter()
        for number, entry in enumerate(entries):
            try:
                pixels[len(used)] = read(folder, entry["file_name"], side)
                used.append(number)
            except Unusable as reason:
                unreadable[str(reason)] += 1
            if on_progress is not None and ((number + 1) % 500 == 0 or number + 1 == len(entries)):
                count = skipped.total() + unreadable.total()
                on_progress(number + 1, len(entries), f"{count} unusable" if count else "")
        return {"used": used, "skipped": unreadable}

    how = (label_of.__qualname__, read.__qualname__, hashlib.sha256(b"\n".join(lines)).hexdigest())
    made_from = fingerprint(folder, [entry["file_name"] for entry in entries], side, *how)
    pixels, report = in_file(store, made_from, len(entries), side, fill)
    used = report["used"]
    return ImageTextPairs(
        Pixels(pixels[: len(used)]),
        captions=[labels[number] for number in used],
        skipped=skipped + Counter(report["skipped"]),
        attributes=[
            {name: json.dumps(entries[number][name], sort_keys=True) for name in fields if name in entries[number]}
            for number in used
        ],
    )


def hold_out(data: ImageTextPairs, share: float, seed: int) -> tuple[ImageTextPairs, ImageTextPairs]:
    """Split into (training, held-out) so that no caption is in both; ValueError if all captions are equal."""
    distinct = sorted(set(data.captions))
    if len(distinct) < 2:
        raise UserError("all captions are the same, so none can be held out; add pictures with other captions")
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = {distinct[index] for index in order[: math.ceil(share * len(distinct))]}
    rows: dict[bool, list[int]] = {False: [], True: []}
    for row, caption in enumerate(data.captions):
        rows[caption in chosen].append(row)
    return data.take(rows[False]), data.take(rows[True])
