"""The order in which a run sees pictures: batches of rows, the same for the same seed and step."""

import itertools
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from dalle_lean.errors import UserError


def shuffled_batches(
    count: int, batch_size: int, seed: int, *, start: int, steps: int
) -> Generator[Tensor, None, None]:
    """The rows, of `count`, of the steps that are left of `steps` once `start` are done.

    Shuffled in each pass, whose last rows are left out where they fill no batch; ValueError where there are too few
    for one.
    """
    if count < batch_size:
        raise UserError(f"{count} pictures to train on; batch_size={batch_size} needs as many")

    def batches() -> Generator[Tensor, None, None]:
        for step in range(start, steps):
            epoch, place = divmod(step, count // batch_size)
            if place == 0 or step == start:
                order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
            yield order[place * batch_size : (place + 1) * batch_size]

    return batches()


def caption_key(caption: str) -> str:
    """The same for captions that differ in capitals and spaces only."""
    return " ".join(caption.lower().split())


def distinct_batches(captions: Sequence[str], batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of rows, shuffled in each pass, none holding a caption twice.

    Two pictures of one caption would count as each other's negatives. A row whose caption the batch already has goes
    into the next one; the batches that a pass leaves unfilled are dropped.
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
