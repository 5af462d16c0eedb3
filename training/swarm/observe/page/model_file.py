"""The newest checkpoint's model folder as one file: packed on the host, fetched by other machines."""

import errno
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from dalle_lean.errors import UserError, is_whole
from dalle_lean.io.files import atomic_write, parse, sha256_file, write_json
from dalle_lean.progress import OnNotice
from training.swarm.host.checkpoints import Checkpoint

NAME = "model.json"
FILE = re.compile(r"model-step-[0-9]{6,12}\.zip")
MOST_BYTES = 2**34
FETCH_S = 20.0  # time limit of a call of `mirror`; the next call continues the download


@dataclass(frozen=True, kw_only=True)
class Download:
    """The content of model.json: the file, its size and its hash."""

    step: int
    file: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        counts = is_whole(self.step) and is_whole(self.size_bytes, MOST_BYTES)
        texts = isinstance(self.file, str) and isinstance(self.sha256, str)
        if not (counts and texts and FILE.fullmatch(self.file) and re.fullmatch(r"[0-9a-f]{64}", self.sha256)):
            raise UserError(f"{NAME} is malformed: {self!r:.200}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse untrusted JSON; ValueError unless it is as `pack` writes it."""
        content = parse(json.loads, text, f"{NAME} is not JSON")
        try:
            return cls(**content)
        except TypeError as error:
            raise UserError(f"{NAME} is malformed: {error}") from None


def pack(checkpoint: Checkpoint, folder: Path) -> None:
    """Pack the checkpoint's model folder into one file in `folder`, replacing the previous one.

    Raises ValueError if the checkpoint is damaged or removed; OSError, before anything is written, if the disk has no
    room, to which the next checkpoint is written too.
    """
    checkpoint.check()
    source, name = checkpoint.folder / "model", f"model-step-{checkpoint.step:06d}"
    path, files = folder / f"{name}.zip", sorted(source.rglob("*"))
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < sum(file.stat().st_size for file in files):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with atomic_write(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for file in files:
            archive.write(file, f"{name}/{file.relative_to(source)}")
    size_bytes, sha256 = path.stat().st_size, sha256_file(path)
    write_json(
        folder / NAME, asdict(Download(step=checkpoint.step, file=path.name, size_bytes=size_bytes, sha256=sha256))
    )
    for other in (*folder.glob("model-step-*.zip"), *folder.glob(".*.part")):
        if other != path:
            other.unlink()


def mirror(
    folder: Path,
    wanted: Download,
    shown: Download | None,
    read: Callable[[str, int], bytes | None],
    on_notice: OnNotice,
) -> Download | None:
    """Continue downloading `wanted` into `folder`; returns it once it is complete and intact, until then `shown`.

    Args:
        shown: the result of the previous call.
        read: returns a chunk of the file with this name from this byte; None or empty if there is none.
    """
    path = folder / wanted.file
    if wanted == shown or (path.exists() and sha256_file(path) == wanted.sha256):
        return wanted
    part, due_s = folder / f".{wanted.sha256}.part", time.monotonic() + FETCH_S
    for other in folder.glob(".*.part"):
        if other != part:
            other.unlink()
    with open(part, "ab") as file:
        while file.tell() < wanted.size_bytes:
            piece = read(wanted.file, file.tell()) if time.monotonic() < due_s else None
            if not piece:
                return shown
            file.write(piece)
    if sha256_file(part) != wanted.sha256:
        part.unlink()
        on_notice(f"{wanted.file} does not match its hash; downloading it again")
        return shown
    os.replace(part, path)
    return wanted
