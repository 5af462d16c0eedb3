"""WebDataset tars, as img2dataset writes them."""

import re
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, cast

from dalle_lean.images.files import MAX_PICTURE_BYTES, PICTURE_SUFFIXES
from dalle_lean.io.remote_io import Unreachable
from preprocessing.sources.files import File, files_fingerprint, is_remote, part_names
from preprocessing.sources.sample import MAX_TEXT_BYTES, Sample, caption_of, json_object, metadata_of

LIMITS = {"picture": MAX_PICTURE_BYTES, "text": MAX_TEXT_BYTES, "json": MAX_TEXT_BYTES}
KINDS = {".txt": "text", ".json": "json", **dict.fromkeys(PICTURE_SUFFIXES, "picture")}
SAMPLE_NAME = re.compile(r"((?:.*/|)[^./][^./]*)(\.[^/]+)", re.DOTALL)
"""A key, which ends at the first dot of the file name, and a suffix."""
MAX_HEADER_BYTES = 2**14  # limit for `tarfile` in front of each member: it keeps extended headers in memory
SCAN_BYTES = 2**20

Contents = dict[str, bytes | None]
"""The first picture, text and JSON of a sample by kind, None if too large; "other" is any other file."""


class TarShards:
    """Tar files of samples; each tar is a part.

    The files of a sample follow one another, in any order, and share their name up to the first dot: a picture, and a
    `.json` (img2dataset's metadata with `caption`), a `.txt` with the caption, or both, of which the JSON's caption
    takes precedence. A damaged stretch of a tar is a sample with the problem "tar_broken"; reading continues at the
    next intact file. Nothing is written to disk, and only one sample's files are in memory.
    """

    def __init__(self, paths: list[str]):
        self.paths = paths
        self.parts = part_names(paths)

    def size(self, part: int) -> int | None:
        """The number of pictures in a local tar, if img2dataset noted it beside the tar."""
        path = self.paths[part]
        if is_remote(path):
            return None
        try:
            with File(path.removesuffix(".tar") + "_stats.json") as file:
                count = (json_object(file.read(MAX_TEXT_BYTES)) or {}).get("successes")
        except OSError:
            return None
        return count if isinstance(count, int) and count >= 0 else None

    def samples(self, part: int) -> Iterator[Sample]:
        path = self.paths[part]
        name = PurePosixPath(path).name
        try:
            with File(path) as file:
                yield from read_samples(file, name)
        except FileNotFoundError:
            yield Sample(key=name, problem="file_missing")
        except Unreachable:
            raise
        except OSError:
            yield Sample(key=name, problem="file_unreadable")

    def fingerprint(self) -> str:
        return files_fingerprint(self.paths)


def read_samples(file: File, name: str) -> Iterator[Sample]:
    """The samples of the tar `name`."""
    key = ""
    contents: Contents = {}
    for member in read_members(file):
        match = SAMPLE_NAME.fullmatch(member.name) if isinstance(member, tarfile.TarInfo) else None
        # A hidden file between two of a sample, as some programs write, does not end it.
        ended = match[1] != key if match else not isinstance(member, tarfile.TarInfo)
        if contents and ended:
            yield make_sample(key, contents)
            contents = {}
        if not isinstance(member, tarfile.TarInfo):
            yield Sample(key=f"{name} byte {member}", problem="tar_broken")
        elif match:
            key, kind = match[1], KINDS.get(match[2].lower(), "other")
            if kind not in contents:
                file.seek(member.offset_data)
                contents[kind] = file.read(member.size) if member.size <= LIMITS.get(kind, 0) else None
    if contents:
        yield make_sample(key, contents)


def read_members(file: File) -> Iterator[tarfile.TarInfo | int]:
    """The complete regular files of a tar, and the byte at which each damaged stretch begins. Anything between two
    members but zeros is damage, and so is an end without a block of zeros."""
    place = end = 0  # where reading goes on, and where the last intact member ends
    while place < file.size:
        file.seek(place)
        try:
            # A new TarFile for each member, because it remembers every header.
            headers = cast(IO[bytes], HeaderReader(file))
            tar = tarfile.TarFile(fileobj=headers, ignore_zeros=True, encoding="utf-8")
            member = tar.next()
        except (tarfile.TarError, ValueError):
            place = file.tell()
            continue
        if member is None:
            break
        if not 0 <= member.size <= file.size - member.offset_data:
            place = member.offset_data
            continue
        if (damage := first_nonzero(file, end, member.offset)) is not None:
            yield damage
        place = end = tar.offset
        if member.isreg() and not member.issparse():
            yield member
    if (damage := first_nonzero(file, end, file.size)) is not None:
        yield damage
    elif file.size - end < tarfile.BLOCKSIZE:
        yield end


class HeaderReader:
    """A file for `tarfile` that gives at most MAX_HEADER_BYTES; ReadError if more are requested."""

    def __init__(self, file: File):
        self.file = file
        self.seek, self.tell = file.seek, file.tell
        self.left_bytes = MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self.left_bytes:
            raise tarfile.ReadError(f"a header asks for {size} bytes")
        self.left_bytes -= size
        return self.file.read(size)


def first_nonzero(file: File, start: int, stop: int) -> int | None:
    """The first byte from `start` to `stop` that is not zero; None if all are."""
    while start < stop:
        file.seek(start)
        content = file.read(min(SCAN_BYTES, stop - start))
        if rest := content.lstrip(b"\0"):
            return start + len(content) - len(rest)
        start += SCAN_BYTES
    return None


def make_sample(key: str, contents: Contents) -> Sample:
    row = json_object(contents["json"] or b"") if "json" in contents else {}
    if row is None:
        # It might have said that the picture must not be used.
        return Sample(key=key, problem="metadata_broken")
    caption, text, picture = caption_of(row), contents.get("text"), contents.get("picture")
    if caption is None and text is not None:
        caption = text.decode("utf-8-sig", errors="replace")
    problem = "picture_missing" if "picture" not in contents else "file_too_large" if picture is None else None
    return Sample(key=key, caption=caption, picture=picture or b"", metadata=metadata_of(row), problem=problem)
