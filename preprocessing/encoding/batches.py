"""What was found of a part: rows to be, in batches for the VQGAN, and what was rejected."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from preprocessing.encoding.decoding import Candidate, Rejection
from preprocessing.encoding.duplicates import NearDuplicates
from preprocessing.shards.files import Row


@dataclass(frozen=True)
class View:
    """A row to be: everything but its codes."""

    candidate: Candidate
    key: str

    def row(self, codes: NDArray[np.int16]) -> Row:
        found = self.candidate
        return Row(
            caption=found.caption,
            codes=codes,
            nsfw=found.nsfw,
            original_width=found.width,
            original_height=found.height,
            url=found.url,
            key=self.key,
        )


@dataclass(frozen=True)
class Batch:
    """Views to be encoded together."""

    part: int
    views: Sequence[View]
    pixels: Tensor
    """[B, side, side, 3], bytes; B is the same for every batch of a job, what follows the views is padding."""
    seen: int
    """Samples of the part that are done with this batch."""


class Part:
    """What was found of a part so far."""

    def __init__(self, number: int, batch_size: int, *, max_hash_distance: int | None, explain: bool, pinned: bool):
        self.number = number
        self.batch_size = batch_size
        self.explain = explain
        self.pinned = pinned
        self.views: deque[tuple[View, NDArray[np.uint8]]] = deque()
        """Still to be encoded."""
        self.kept = 0
        self.rejected: Counter[str] = Counter()
        self.explained: list[Rejection] = []
        """Only where asked: a few bytes of a damaged source can stand for millions."""
        self.copies = None if max_hash_distance is None else NearDuplicates(max_hash_distance)

    def add(self, result: Candidate | Rejection) -> None:
        if isinstance(result, Candidate) and (copy := self.earlier_copy(result)) is not None:
            result = Rejection(result.key, "duplicate", f"looks like {copy}")
        if isinstance(result, Rejection):
            self.rejected[result.reason] += 1
            if self.explain:
                self.explained.append(result)
            return
        self.kept += 1
        for place, square in enumerate(result.pixels):
            self.views.append((View(result, result.view_key(place)), square))

    def earlier_copy(self, candidate: Candidate) -> str | None:
        """The key of a picture of this part that looks the same; without one this picture is kept in mind."""
        if self.copies is None or candidate.hash is None:
            return None
        found = self.copies.find(candidate.hash)
        if found is None:
            self.copies.add(candidate.hash, candidate.key)
        return found

    def batch(self) -> Batch:
        """Take the next views out."""
        chosen = [self.views.popleft() for _ in range(min(self.batch_size, len(self.views)))]
        pixels = torch.zeros(self.batch_size, *chosen[0][1].shape, dtype=torch.uint8, pin_memory=self.pinned)
        np.stack([square for _, square in chosen], out=pixels.numpy()[: len(chosen)])
        return Batch(self.number, [view for view, _ in chosen], pixels, self.kept + self.rejected.total())
