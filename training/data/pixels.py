"""Decoded pictures, in memory or in a memory-mapped file: as many as the disk holds.

Shapes: N pictures, S side in pixels.
"""

import hashlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write, read_json, write_json
from dalle_lean.memory.plan_search import human_bytes

logger = logging.getLogger(__name__)

CHUNK = 1024
MOST_NOTE_BYTES = 2**30

Fill = Callable[[Tensor], Any]
"""Writes pictures into a tensor [N, 3, S, S]; returns a report on them, ready for JSON."""


class Pixels:
    """Pictures, uint8 [N, 3, S, S]: chosen rows of one or two stored tensors, copied where they are asked for."""

    def __init__(self, stored: Tensor, rows: Tensor | None = None, others: Tensor | None = None):
        """rows: int64 [N], of `stored` with `others` behind it; None is all of `stored`."""
        self.stored, self.others = stored, stored[:0] if others is None else others
        self.rows = torch.arange(len(stored)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: Sequence[int] | Tensor | slice) -> Tensor:
        """The pictures at these places."""
        rows = self.rows[places]
        if not len(self.others):
            return self.stored[rows]
        found = torch.empty(len(rows), *self.stored.shape[1:], dtype=torch.uint8)
        behind = rows >= len(self.stored)
        found[~behind] = self.stored[rows[~behind]]
        found[behind] = self.others[rows[behind] - len(self.stored)]
        return found

    def take(self, places: Sequence[int] | Tensor | slice) -> "Pixels":
        """Those at these places; nothing is copied."""
        return Pixels(self.stored, self.rows[places], self.others)

    def replaced(self, places: Tensor, others: Tensor) -> "Pixels":
        """With `others` [n, 3, S, S] at the places [n]; nothing is copied."""
        rows = self.rows.index_copy(0, places, len(self.stored) + torch.arange(len(others)))
        return Pixels(self.stored, rows, others)

    def digest(self, before: bytes = b"") -> str:
        """SHA-256 over the bytes `before` and all pictures."""
        running = hashlib.sha256(before)
        for start in range(0, len(self), CHUNK):
            running.update(self[start : start + CHUNK].numpy().data)
        return running.hexdigest()


def in_memory(count: int, side: int, fill: Fill) -> tuple[Tensor, Any]:
    """uint8 [count, 3, side, side], filled, and the report of `fill`."""
    pixels = torch.empty(count, 3, side, side, dtype=torch.uint8)
    return pixels, fill(pixels)


def in_file(path: Path, made_from: str, count: int, side: int, fill: Fill) -> tuple[Tensor, Any]:
    """As `in_memory`, in the file `path`; what an earlier call left there is taken if it was `made_from` the same.

    The report of `fill` stands beside it as .json. ValueError, before anything is decoded, where the disk has no room.
    """
    if not count:
        return in_memory(count, side, fill)
    note, shape = path.with_suffix(".json"), (count, 3, side, side)
    if path.is_file() and note.is_file():
        left = read_json(note, MOST_NOTE_BYTES)
        pixels = np.load(path, mmap_mode="c", allow_pickle=False)
        if left.get("made_from") == made_from and pixels.shape == shape and pixels.dtype == np.uint8:
            return torch.from_numpy(pixels), left["said"]
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in (note, path, *path.parent.glob(f".{path.name}.*.tmp")):  # these are what a killed run left
        old.unlink(missing_ok=True)
    need, free = math.prod(shape), shutil.disk_usage(path.parent).free
    room = f"{count:,} pictures of {side}x{side} pixels take {human_bytes(need)}, {human_bytes(free)} are free there"
    if need > free:
        raise UserError(f"{path}: {room}; make room, or name a folder on another disk")
    logger.info(f"decoding into {path}: {room}")
    with atomic_write(path) as temporary:
        pixels = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape)
        with open(temporary, "r+b") as file:  # a disk that is full later would end the process at a write to memory
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        report = fill(torch.from_numpy(pixels))
        pixels.flush()
    write_json(note, {"made_from": made_from, "said": report})
    return torch.from_numpy(pixels), report


def stamp(folder: Path, names: Iterable[str], *settings: object) -> str:
    """SHA-256 over settings and the files' names, sizes and times: another one where a file was changed."""
    running = hashlib.sha256(repr((str(folder.resolve()), settings)).encode("utf-8", "surrogatepass"))
    for name in names:
        try:
            status = os.stat(folder / name)
            facts: tuple[int, ...] = (status.st_size, status.st_mtime_ns)
        except (OSError, ValueError):  # too long, a zero byte
            facts = ()
        running.update(repr((name, facts)).encode("utf-8", "surrogatepass"))
    return running.hexdigest()
