"""Decoded pictures in a memory-mapped file, and their reconstructions by a VQGAN.

Shapes: N pictures, S side in pixels.
"""

import hashlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.io.files import atomic_write, read_json, write_json
from dalle_lean.precision import autocast
from dalle_lean.words import human_bytes

logger = logging.getLogger(__name__)

CHUNK = 1024
RECONSTRUCTED_AT_ONCE = 64
MOST_NOTE_BYTES = 2**30

Fill = Callable[[Tensor], Any]
"""Writes pictures into a tensor [N, 3, S, S] and returns a report on them, ready for JSON."""


class Pixels:
    """Pictures, uint8 [N, 3, S, S]: rows of one or two stored tensors, copied on access."""

    def __init__(self, stored: Tensor, rows: Tensor | None = None, others: Tensor | None = None):
        """rows: int64 [N], into `stored` followed by `others`; None means all of `stored`."""
        self.stored, self.others = stored, stored[:0] if others is None else others
        self.rows = torch.arange(len(stored)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Sequence[int] | Tensor | slice) -> Tensor:
        """Copies of the pictures at these indices."""
        rows = self.rows[index]
        if not len(self.others):
            return self.stored[rows]
        found = torch.empty(len(rows), *self.stored.shape[1:], dtype=torch.uint8)
        from_others = rows >= len(self.stored)
        found[~from_others] = self.stored[rows[~from_others]]
        found[from_others] = self.others[rows[from_others] - len(self.stored)]
        return found

    def take(self, index: Sequence[int] | Tensor | slice) -> "Pixels":
        """The pictures at these indices, without copying."""
        return Pixels(self.stored, self.rows[index], self.others)

    def replaced(self, index: Tensor, others: Tensor) -> "Pixels":
        """The pictures with `others` [n, 3, S, S] at the indices [n], without copying."""
        rows = self.rows.index_copy(0, index, len(self.stored) + torch.arange(len(others)))
        return Pixels(self.stored, rows, others)

    def digest(self, before: bytes = b"") -> str:
        """SHA-256 of the bytes `before` and all pictures."""
        running = hashlib.sha256(before)
        for start in range(0, len(self), CHUNK):
            running.update(self[start : start + CHUNK].numpy().data)
        return running.hexdigest()


def reconstructions(vqgan: VQGAN, pixels: Pixels, precision: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Encode pictures and decode their codes, some n at a time, on the VQGAN's device; yields the originals in 0..1
    [n, 3, S, S], their codes [n, I] and the reconstructions."""
    device = vqgan.quant_conv.weight.device
    for start in range(0, len(pixels), RECONSTRUCTED_AT_ONCE):
        originals = pixels[start : start + RECONSTRUCTED_AT_ONCE].to(device).float() / 255
        with autocast(device.type, precision):
            codes = vqgan.encode(originals)
            decoded = vqgan.decode(codes)
        yield originals, codes, decoded.float()


def in_file(path: Path, made_from: str, count: int, side: int, fill: Fill) -> tuple[Tensor, Any]:
    """A filled uint8 tensor [count, 3, side, side] in the file `path`, and the report of `fill`, in a .json beside it.

    Both are reused if an earlier call wrote them with the same `made_from`. ValueError, before anything is decoded, if
    the disk lacks space.
    """
    note, shape = path.with_suffix(".json"), (count, 3, side, side)
    if not count:  # an empty file cannot be mapped
        nothing = torch.empty(shape, dtype=torch.uint8)
        return nothing, fill(nothing)
    if path.is_file() and note.is_file():
        left = read_json(note, MOST_NOTE_BYTES)
        pixels = np.load(path, mmap_mode="c", allow_pickle=False)
        if left.get("made_from") == made_from and pixels.shape == shape and pixels.dtype == np.uint8:
            return torch.from_numpy(pixels), left["said"]
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in (note, path, *path.parent.glob(f".{path.name}.*.tmp")):  # .tmp: left by a killed run
        old.unlink(missing_ok=True)
    need, free = math.prod(shape), shutil.disk_usage(path.parent).free
    space = f"{count:,} pictures of {side}x{side} pixels take {human_bytes(need)}, {human_bytes(free)} are free there"
    if need > free:
        raise UserError(f"{path}: {space}; free some space, or name a folder on another disk")
    logger.info(f"decoding into {path}: {space}")
    with atomic_write(path) as temporary:
        pixels = np.lib.format.open_memmap(temporary, "w+", np.uint8, shape)
        # On a full disk, a write to the mapping would kill the process (SIGBUS). macOS cannot reserve the space.
        if hasattr(os, "posix_fallocate"):
            with open(temporary, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        report = fill(torch.from_numpy(pixels))
        pixels.flush()
    write_json(note, {"made_from": made_from, "said": report})
    return torch.from_numpy(pixels), report


def fingerprint(folder: Path, names: Iterable[str], *settings: object) -> str:
    """SHA-256 of the settings and the files' names, sizes and modification times."""
    running = hashlib.sha256(repr((str(folder.resolve()), settings)).encode("utf-8", "surrogatepass"))
    for name in names:
        try:
            status = os.stat(folder / name)
            facts: tuple[int, ...] = (status.st_size, status.st_mtime_ns)
        except (OSError, ValueError):  # missing, or a name that is too long or has a zero byte
            facts = ()
        running.update(repr((name, facts)).encode("utf-8", "surrogatepass"))
    return running.hexdigest()
