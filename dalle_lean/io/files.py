"""Files and folders: atomic writes, locks and content hashes."""

import glob
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError

MOST_BYTES = 2**24
"""Limit of a file that is read as a whole: those written here have a few KB, for many shards a few MB."""
MAX_DEPTH = 64  # limit of nesting in JSON and TOML, in levels


@contextmanager
def atomic_write(path: str | Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success sync it and rename it onto `path`, on failure remove it. A kill
    at any moment leaves the old file or the new one, never half of either. `mode`: the file's permissions."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for a lock file and exclude other processes; the kernel releases the lock of a killed one."""
    import fcntl  # Windows has none

    with open(path, "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_output_folder(folder: Path) -> None:
    """UserError unless `folder` is a folder to write to or can become one; nothing is left behind."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; --out needs a folder")
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryDirectory(dir=nearest).cleanup()
    except OSError:
        raise UserError(f"{folder}: no file can be created in {nearest}; name another folder with --out") from None


@contextmanager
def fresh_folder(place: Path) -> Iterator[Path]:
    """Yield a new hidden folder beside `place`, to be renamed to `place`; at the end it is removed if it still exists.
    Leftovers of dead processes of this machine for the same place are removed first."""
    place.parent.mkdir(parents=True, exist_ok=True)
    for leftover in place.parent.glob(f".{glob.escape(place.name)}.*.tmp"):
        owner = re.fullmatch(rf"\.(\d+)-{re.escape(host_name())}\..*\.tmp", leftover.name[1 + len(place.name) :])
        if owner and not is_alive(int(owner[1])):
            shutil.rmtree(leftover, ignore_errors=True)
    prefix = f".{place.name}.{os.getpid()}-{host_name()}."
    fresh = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=place.parent))
    fresh.chmod(0o755)  # mkdtemp makes folders that only their owner can read
    try:
        yield fresh
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, or copy it if that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def host_name() -> str:
    """This machine's name in characters fit for a file name, to tell apart machines that share a file system."""
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40]


def is_alive(pid: int) -> bool:
    """Whether this machine has a process with this id."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True


def sync_files(folder: Path) -> None:
    """Write what the files of a folder hold to the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file, atomically."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: str | Path, content: Any) -> None:
    """Write `content` as indented JSON with a final newline, atomically."""
    write_bytes(path, f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode())


def read_bytes(path: str | Path, limit_bytes: int = MOST_BYTES) -> bytes:
    """The bytes of a file; UserError, before it is read, if it has more than `limit_bytes`."""
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        content = file.read(limit_bytes + 1) if size_bytes <= limit_bytes else b""
    if max(size_bytes, len(content)) > limit_bytes:
        raise UserError(f"{path} has {max(size_bytes, len(content)):,} bytes: it may have {limit_bytes:,} at most")
    return content


def read_text(path: str | Path, limit_bytes: int = MOST_BYTES) -> str:
    """UTF-8 text of at most `limit_bytes`; UserError names a file with anything else."""
    try:
        return read_bytes(path, limit_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: {error}") from None


def read_json(path: str | Path, limit_bytes: int = MOST_BYTES) -> Any:
    """JSON of at most `limit_bytes`; UserError names a file with anything else."""
    return parse(json.loads, read_text(path, limit_bytes), f"{path} is not JSON")


def read_format(path: str | Path, expected: str, limit_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """A JSON object whose "format" is `expected`; UserError names a file with anything else."""
    content = read_json(path, limit_bytes)
    if not isinstance(content, dict) or content.get("format") != expected:
        raise UserError(f"{path} is not of the format {expected}")
    return content


def parse(loads: Callable[[Any], Any], text: str | bytes, complaint: str) -> Any:
    """`loads(text)`; UserError, which begins with `complaint`, where it fails and beyond MAX_DEPTH levels of nesting.

    loads: parses JSON or TOML; raises ValueError.
    """
    try:
        content = loads(text)
    except ValueError as error:
        raise UserError(f"{complaint}: {error}") from None
    except RecursionError:
        raise UserError(f"{complaint}: it is nested too deep") from None
    level = [content]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for part in level
            if isinstance(part, dict | list)
            for child in (part.values() if isinstance(part, dict) else part)
        ]
    if level:
        raise UserError(f"{complaint}: it is nested too deep")
    return content


def sha256_file(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
