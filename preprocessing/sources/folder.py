"""Folders of pictures, with captions in one list or beside each picture."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from dalle_lean.errors import UserError
from dalle_lean.images.files import PICTURE_SUFFIXES, lies_in, read_picture
from dalle_lean.images.image_folder import LISTING, Unusable, listed_file, parse_line
from preprocessing.sources.sample import (
    MAX_CAPTION_BYTES,
    MAX_TEXT_BYTES,
    NumberedParts,
    Sample,
    caption_of,
    json_object,
    metadata_of,
    scalar,
)


class ListedFolder(NumberedParts):
    """Pictures listed in `metadata.jsonl`, as for `datasets`' ImageFolder, in the order of its lines.

    Each line is an object with `file_name` (relative to the folder), the caption under `text` or `caption`, and
    optionally `key`, `url`, `NSFW`, `original_width`, `original_height`. Any other line, a line of over 1 MiB and a
    file outside the folder, even through a link, become samples with a problem.
    """

    def __init__(self, folder: Path, part_rows: int):
        self.folder = folder
        self.listing = folder / LISTING
        self.part_starts: list[tuple[int, int]] = []  # byte and number of the first line of each part
        start = num_lines = 0
        with self.listing.open("rb") as file:
            for number, (line, line_bytes) in enumerate(read_lines(file), start=1):
                if line.strip():
                    if num_lines % part_rows == 0:
                        self.part_starts.append((start, number))
                    num_lines += 1
                start += line_bytes
        if not num_lines:
            raise UserError(f"{self.listing} lists no picture")
        super().__init__(num_lines, part_rows)

    def samples(self, part: int) -> Iterator[Sample]:
        for number, line in islice(self.numbered_lines(*self.part_starts[part]), self.size(part)):
            yield self.sample(number, line)

    def numbered_lines(self, start: int, first: int) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank and their numbers, from line `first`, which begins at byte `start`."""
        with self.listing.open("rb") as file:
            file.seek(start)
            for number, (line, _) in enumerate(read_lines(file), start=first):
                if line.strip():
                    yield number, line.removesuffix(b"\n")

    def sample(self, number: int, line: bytes) -> Sample:
        try:
            row = parse_line(line if len(line) <= MAX_TEXT_BYTES else b"")
        except Unusable:
            return Sample(key=f"{LISTING} line {number}", problem="metadata_broken")
        key = str(scalar(row, ("key",)) or row["file_name"])
        caption = caption_of(row)
        try:
            picture, problem = read_picture(listed_file(self.folder, row["file_name"]))
        except Unusable:
            return Sample(key=key, caption=caption, problem="picture_outside_folder")
        return Sample(key=key, caption=caption, picture=picture, metadata=metadata_of(row), problem=problem)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for _, line in self.numbered_lines(0, 1):
            row = json_object(line) or {}
            name = row.get("file_name")
            digest.update(repr((line, file_size(self.folder / name) if isinstance(name, str) else None)).encode())
        return digest.hexdigest()


class CaptionedFolder(NumberedParts):
    """All pictures below a folder, in the order of their names, each with its caption in a .txt of the same name.

    The caption is the whole text, with each run of white space as one space; without a .txt it is None. A .json of the
    same name, as img2dataset writes it, may hold the caption and `Sample.metadata`. A link out of the folder is a
    sample with a problem.
    """

    def __init__(self, folder: Path, part_rows: int):
        self.folder = folder
        files = (path for path in folder.rglob("*") if path.suffix.lower() in PICTURE_SUFFIXES)
        self.names = sorted(path.relative_to(folder).as_posix() for path in files)
        super().__init__(len(self.names), part_rows)

    def samples(self, part: int) -> Iterator[Sample]:
        for row in self.rows(part):
            yield self.sample(self.names[row])

    def sample(self, name: str) -> Sample:
        path = self.folder / name
        if not all(lies_in(self.folder, file) for file in (path, path.with_suffix(".json"), path.with_suffix(".txt"))):
            return Sample(key=name, problem="picture_outside_folder")
        text = read_text(path.with_suffix(".json"))
        metadata = {} if text is None else json_object(text)
        if metadata is None:
            return Sample(key=name, problem="metadata_broken")
        picture, problem = read_picture(path)
        caption = read_caption(path.with_suffix(".txt")) or caption_of(metadata)
        return Sample(key=name, caption=caption, picture=picture, metadata=metadata_of(metadata), problem=problem)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in self.names:
            path = self.folder / name
            digest.update(repr((name, file_size(path), read_caption(path.with_suffix(".txt")))).encode())
            if metadata := read_text(path.with_suffix(".json")):
                digest.update(metadata)
        return digest.hexdigest()


def read_lines(file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Lines, cut to MAX_TEXT_BYTES + 1 bytes, and their full lengths in bytes."""
    while line := file.readline(MAX_TEXT_BYTES + 1):
        rest, length = line, len(line)
        while len(rest) > MAX_TEXT_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_TEXT_BYTES + 1)
            length += len(rest)
        yield line, length


def file_size(path: Path) -> int | None:
    """Size in bytes, None if there is no file: reveals most changed pictures, and is the same in copies of a source."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return None


def read_caption(path: Path) -> str | None:
    text = read_text(path)
    return None if text is None else " ".join(text[:MAX_CAPTION_BYTES].decode("utf-8-sig", errors="replace").split())


def read_text(path: Path) -> bytes | None:
    """The content of a small file; None if there is none."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES)
    except OSError:
        return None
