"""What a part of the source has yielded so far: rows to encode, and rejections."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from preprocessing.encoding.decoding import Candidate, Rejection
from preprocessing.encoding.duplicates import NearDuplicates
from preprocessing.shards.files import Row

PendingRow = partial[Row]
"""A row that lacks only `codes=`."""


@dataclass(frozen=True)
class Batch:
    """Rows to encode together."""

    part: int
    rows: Sequence[PendingRow]
    pixels: Tensor
    """uint8 [B, side, side, 3]; B is the same for every batch of a job, with padding after the rows."""
    seen: int
    """Samples of the part that are done after this batch."""


class PartBuffer:
    """Collects the rows and rejections of one part, and hands out the rows in batches."""

    def __init__(self, number: int, batch_size: int, *, max_hash_distance: int | None, explain: bool, pinned: bool):
        self.number = number
        self.batch_size = batch_size
        self.explain = explain
        self.pinned = pinned
        self.pending: deque[tuple[PendingRow, NDArray[np.uint8]]] = deque()
        """Still to encode, with their pixels."""
        self.kept = 0
        self.rejected: Counter[str] = Counter()
        self.explained: list[Rejection] = []
        """Only with `explain`: a few bytes of a damaged source can stand for millions."""
        self.copies = None if max_hash_distance is None else NearDuplicates(max_hash_distance)

    @property
    def seen(self) -> int:
        """Samples that were added."""
        return self.kept + self.rejected.total()

    def add(self, result: Candidate | Rejection) -> None:
        if isinstance(result, Candidate) and (copy := self.earlier_copy(result)) is not None:
            result = Rejection(result.key, "duplicate", f"looks like {copy}")
        if isinstance(result, Rejection):
            self.rejected[result.reason] += 1
            if self.explain:
                self.explained.append(result)
            return
        self.kept += 1
        for view, pixels in enumerate(result.pixels):
            row = partial(
                Row,
                caption=result.caption,
                nsfw=result.nsfw,
                original_width=result.width,
                original_height=result.height,
                url=result.url,
                key=f"{result.key}#{view}" if view else result.key,  # the first view has the picture's key
            )
            self.pending.append((row, pixels))

    def earlier_copy(self, candidate: Candidate) -> str | None:
        """The key of an earlier picture of this part that looks the same; if there is none, remembers this one."""
        if self.copies is None or candidate.hash is None:
            return None
        found = self.copies.find(candidate.hash)
        if found is None:
            self.copies.add(candidate.hash, candidate.key)
        return found

    def take_batch(self) -> Batch:
        chosen = [self.pending.popleft() for _ in range(min(self.batch_size, len(self.pending)))]
        pixels = torch.zeros(self.batch_size, *chosen[0][1].shape, dtype=torch.uint8, pin_memory=self.pinned)
        np.stack([one for _, one in chosen], out=pixels.numpy()[: len(chosen)])
        return Batch(self.number, [row for row, _ in chosen], pixels, self.seen)
