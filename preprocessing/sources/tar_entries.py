"""Walking through a tar that may be damaged or hostile.

`tarfile.TarInfo` reads the headers. Going from one to the next is done here, because `tarfile.TarFile` takes the first
damaged header for the end, trusts lengths, and keeps every header in memory.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from preprocessing.sources.files import File

BLOCK_BYTES = 512
MAX_EXTENSION_BYTES = 2**20
EXTENSIONS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
EXTENDED_FIELD = re.compile(rb"\d{1,9} (path|size)=([^\n]{1,4096})\n")


@dataclass(frozen=True)
class Entry:
    """A regular file within a tar: its name, and where it is, in bytes."""

    name: str
    start: int
    size: int


@dataclass(frozen=True)
class Damage:
    """The byte where a stretch begins that cannot be read."""

    start: int


def read_entries(file: File) -> Iterator[Entry | Damage]:
    """The regular files of a tar in their order, each wholly there, and every stretch that is damaged.

    After a damaged stretch it goes on at the next sound header. A tar without the mark of its end is damaged there.
    """
    place = 0
    sound, ended = True, False
    extended: dict[str, str] = {}
    while len(block := read_block(file, place)) == BLOCK_BYTES:
        if not any(block):  # marks the end; but tars may be joined one behind the other
            sound, ended, extended = True, True, {}
            place += BLOCK_BYTES
            continue
        ended = False
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            start = place + BLOCK_BYTES
            size = content_bytes(header, extended)
            if not 0 <= size <= file.size - start:
                raise ValueError(f"{size} bytes of content in a tar of {file.size}")
        except (tarfile.TarError, ValueError):
            if sound:
                yield Damage(place)
            sound, extended = False, {}
            place += BLOCK_BYTES
            continue
        sound = True
        place = start + -(-size // BLOCK_BYTES) * BLOCK_BYTES
        if header.type in EXTENSIONS:
            file.seek(start)
            extended |= extended_fields(header.type, file.read(min(size, MAX_EXTENSION_BYTES)))
            continue
        if header.type in REGULAR:
            yield Entry(extended.get("path", header.name), start, size)
        extended = {}
    if sound and (block or not ended):
        yield Damage(place)


def read_block(file: File, place: int) -> bytes:
    file.seek(place)
    return file.read(BLOCK_BYTES)


def content_bytes(header: tarfile.TarInfo, extended: dict[str, str]) -> int:
    """How many bytes follow a header; ValueError for a size that is none."""
    if header.type in EXTENSIONS:
        return header.size
    if header.isreg() or header.type not in tarfile.SUPPORTED_TYPES:
        return int(extended.get("size", header.size))
    return 0


def extended_fields(kind: bytes, content: bytes) -> dict[str, str]:
    """What an extension says of the file that follows it: its whole `path`, its `size` in bytes."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": content.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    if kind == tarfile.XHDTYPE:
        fields = EXTENDED_FIELD.findall(content)
        return {name.decode(): value.decode("utf-8", "surrogateescape") for name, value in fields}
    return {}
