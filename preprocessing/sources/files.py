"""Local and remote files through fsspec: patterns, names of parts, reading with retries."""

import hashlib
import io
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

from dalle_lean.errors import UserError
from dalle_lean.io.remote_io import Patience, RemoteFile, storage_of

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MAX_FILES = 1_000_000
LOCAL = ("file://", "local://", "memory://")
READ_AHEAD_BYTES = 5 * 2**20
PATIENCE = Patience(timeout_s=600.0, give_up_s=60.0)  # generous, since listing a pattern of a million names takes long

T = TypeVar("T")


def expand_braces(pattern: str) -> list[str]:
    """Expand `{00000..00999}` and `{a,b}` as a shell does; UserError for a pattern of too many names."""
    match = BRACES.search(pattern)
    if not match:
        return [pattern]
    if bounds := RANGE.fullmatch(match[1]):
        first, last = int(bounds[1]), int(bounds[2])
        if not first <= last < first + MAX_FILES:
            raise UserError(f"{match[0]}: must count upwards, to at most {MAX_FILES} names")
        words = [str(number).zfill(len(bounds[1])) for number in range(first, last + 1)]
    else:
        words = match[1].split(",")
    names: list[str] = []
    for word in words:
        names += expand_braces(pattern[: match.start()] + word + pattern[match.end() :])
        if len(names) > MAX_FILES:
            raise UserError(f"{pattern}: stands for more than {MAX_FILES} names")
    return names


def list_files(pattern: str) -> list[str]:
    """The files that match a pattern with braces, `*` or neither. Names that are spelled out, also with braces, keep
    their order and need not exist; matches of `*` are sorted. Raises Unreachable if a storage does not answer."""
    paths: list[str] = []
    for name in expand_braces(pattern):
        if "*" in name:
            files, path = storage_of(name)
            found = insist(name, partial(files.glob, path))
            paths += sorted(files.unstrip_protocol(file) if "://" in name else file for file in found)
        else:
            paths.append(name)
    return paths


def part_names(paths: Sequence[str]) -> list[str]:
    """The files' stems, numbered if two are equal."""
    stems = [re.sub(r"[^A-Za-z0-9_.-]", "_", PurePosixPath(path).stem)[:100] for path in paths]
    if len({stem.casefold() for stem in stems}) == len(stems):
        return stems
    return [f"{number:05d}-{stem}" for number, stem in enumerate(stems)]


def files_fingerprint(paths: Sequence[str]) -> str:
    """A hash of the files' names and sizes in bytes: the same for a copy elsewhere. Raises Unreachable if a storage
    does not answer: an unknown size would later look like a changed source."""
    digest = hashlib.sha256()
    with ThreadPoolExecutor(16, thread_name_prefix="size") as pool:
        for path, size in zip(paths, pool.map(file_bytes, paths), strict=True):
            digest.update(repr((PurePosixPath(path).name, size)).encode())
    return digest.hexdigest()


def file_bytes(path: str) -> int | None:
    """Size of a file; None if there is no file or its storage does not tell. Unreachable if the storage fails."""
    files, name = storage_of(path)
    try:
        return insist(path, lambda: files.size(name))
    except FileNotFoundError:
        return None


def is_remote(path: str) -> bool:
    return "://" in path and not path.startswith(LOCAL)


def insist(path: str, action: Callable[[], T]) -> T:
    """Return `action()`, with retries for a remote file; see `Patience.insist`."""
    return PATIENCE.insist(path, action) if is_remote(path) else action()


class File(io.BufferedReader):
    """A file opened for reading; reads of a remote one are retried. Raises FileNotFoundError, Unreachable for a remote
    file, OSError for a local one that cannot be read."""

    def __init__(self, path: str):
        if is_remote(path):
            raw: Any = RemoteFile(path, PATIENCE)
            buffer_bytes = READ_AHEAD_BYTES
            if raw.size <= buffer_bytes:  # for servers without range requests
                raw = io.BytesIO(raw.read(raw.size))
        else:
            files, name = storage_of(path)
            raw, buffer_bytes = files.open(name, "rb"), io.DEFAULT_BUFFER_SIZE
        super().__init__(raw, buffer_bytes)
        self.size = self.seek(0, io.SEEK_END)  # bytes
        self.seek(0)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most what is left: a damaged file may claim more, for which memory would be allocated."""
        left = max(0, self.size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))
