"""The order in which a run sees pictures: batches of rows, determined by the seed and the step."""

import itertools
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from dalle_lean.errors import UserError


def shuffled_batches(
    count: int, batch_size: int, seed: int, *, start: int, steps: int
) -> Generator[Tensor, None, None]:
    """Batches of rows [batch_size] in 0..count-1 for the steps after `start`, up to `steps`.

    Each pass is shuffled; its last, incomplete batch is dropped. ValueError if `count` is below `batch_size`.
    """
    if count < batch_size:
        raise UserError(f"{count} pictures to train on, fewer than batch_size={batch_size}: add pictures or lower it")

    def batches() -> Generator[Tensor, None, None]:
        for step in range(start, steps):
            epoch, place = divmod(step, count // batch_size)
            if place == 0 or step == start:
                order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
            yield order[place * batch_size : (place + 1) * batch_size]

    return batches()


def caption_key(caption: str) -> str:
    """Normalize a caption for comparison: lower case, single spaces."""
    return " ".join(caption.lower().split())


def distinct_batches(captions: Sequence[str], batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches of rows without end, shuffled in each pass, no caption twice in a batch.

    Two pictures with one caption would count as each other's negatives. A row whose caption is already in the batch
    goes into the next one; batches still incomplete at the end of a pass are dropped.
    """
    keys = [caption_key(caption) for caption in captions]
    if not 2 <= batch_size <= len(set(keys)):
        raise UserError(f"batch_size={batch_size}: must be in 2..{len(set(keys))}, the number of different captions")
    for epoch in itertools.count():
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        unfilled: list[dict[str, int]] = []
        for row in order:
            batch = next((batch for batch in unfilled if keys[row] not in batch), None)
            if batch is None:
                unfilled.append(batch := {})
            batch[keys[row]] = row
            if len(batch) == batch_size:
                unfilled.remove(batch)
                yield list(batch.values())
