"""Local and remote files through fsspec: patterns, names of parts, reading with retries."""

import hashlib
import io
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

from dalle_lean.errors import UserError
from dalle_lean.io.remote_errors import Refused, Unreachable, meaning, one_line, storage_of

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MAX_FILES = 1_000_000
LOCAL = ("file://", "local://", "memory://")
TRIES = 7
FIRST_PAUSE_S = 1.0

T = TypeVar("T")


def expand_braces(pattern: str) -> list[str]:
    """Expand `{00000..00999}` and `{a,b}` as a shell does; ValueError for a pattern of too many names."""
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
    """The files that a pattern with braces, `*` or neither stands for.

    Names that are spelled out, also with braces, keep their order and need not exist; what `*` finds is sorted. Raises
    Unreachable if a storage does not answer.
    """
    paths: list[str] = []
    for name in expand_braces(pattern):
        if "*" in name:
            files, path = storage_of(name, extra="preprocessing")
            found = try_again(name, partial(files.glob, path))
            paths += sorted(files.unstrip_protocol(file) if "://" in name else file for file in found)
        else:
            paths.append(name)
    return paths


def part_names(paths: Sequence[str]) -> list[str]:
    """The files' stems, numbered if two are alike."""
    stems = [re.sub(r"[^A-Za-z0-9_.-]", "_", PurePosixPath(path).stem)[:100] for path in paths]
    if len({stem.casefold() for stem in stems}) == len(stems):
        return stems
    return [f"{number:05d}-{stem}" for number, stem in enumerate(stems)]


def files_fingerprint(paths: Sequence[str]) -> str:
    """A hash of the files' names and sizes in bytes: the same for a copy elsewhere.

    Unreachable if a storage does not answer: an unknown size would later look like a changed source.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(16, thread_name_prefix="size") as pool:
        for path, size in zip(paths, pool.map(file_bytes, paths), strict=True):
            digest.update(repr((PurePosixPath(path).name, size)).encode())
    return digest.hexdigest()


def file_bytes(path: str) -> int | None:
    """Size of a file; None if there is no file or its storage does not say. Unreachable if the storage fails."""
    files, name = storage_of(path, extra="preprocessing")
    try:
        return try_again(path, lambda: files.size(name))
    except FileNotFoundError:
        return None


def is_remote(path: str) -> bool:
    return "://" in path and not path.startswith(LOCAL)


def try_again(path: str, action: Callable[[], T]) -> T:
    """The result of `action`, which is repeated after failures of a remote storage that may pass, see `meaning`.

    Raises FileNotFoundError, UserError or Unreachable for a remote file, and for a local one what `action` raises.
    """
    for pause in range(TRIES):
        if pause:
            time.sleep(FIRST_PAUSE_S * 2 ** (pause - 1))
        try:
            return action()
        except Exception as error:  # storages have errors of their own
            if not is_remote(path):
                raise
            reason = meaning(error, path)
            if isinstance(reason, FileNotFoundError | Refused | UserError):
                raise reason from None
            if pause == TRIES - 1:
                raise Unreachable(f"{path}: {one_line(reason)}") from error
    raise AssertionError("unreachable")


class File(io.RawIOBase):
    """A file opened for reading; after a failure a remote one is reopened at the same place, several times.

    Raises FileNotFoundError, Unreachable for a remote file, OSError for a local one that cannot be read.
    """

    def __init__(self, path: str):
        super().__init__()
        self.path = path
        self.position = 0
        self.file: Any = None
        self.size = self.seek(0, io.SEEK_END)
        """Bytes."""
        self.seek(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, but never beyond the end, because remote file systems disagree on what that means."""
        if whence == io.SEEK_SET:
            offset = min(offset, self.size)
        self.position = self.attempt("seek", offset, whence)
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        left = self.size - self.position
        data = self.attempt("read", left if size is None or size < 0 else min(size, left))
        self.position += len(data)
        return data

    def attempt(self, method: str, *arguments: Any) -> Any:
        files, name = storage_of(self.path, extra="preprocessing")

        def once() -> Any:
            try:
                if self.file is None:
                    self.file = files.open(name, "rb")
                    self.file.seek(self.position)
                return getattr(self.file, method)(*arguments)
            except Exception:
                self.drop()
                raise

        return try_again(self.path, once)

    def drop(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def close(self) -> None:
        self.drop()
        super().close()
