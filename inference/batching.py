"""How many pictures are drawn at once, and which ones together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dalle_lean.free_memory import free_bytes
from dalle_lean.model.config import DalleConfig
from inference.sampling.kv_layout import window_of
from inference.sampling.packed_linear import ROW_GROUP

LARGEST_BATCH = 128
# The rest is for a step's temporaries, the VQGAN's decoder and other programs.
SHARE_OF_FREE_MEMORY = 0.5


class Part(NamedTuple):
    """Some pictures of one request."""

    request: int
    pictures: range


Batch = list[Part]  # parts with the same number of pictures


class Kind(NamedTuple):
    """What pictures must have in common to be drawn together."""

    guided: bool
    num_given: int  # codes given with the request

    @property
    def rows(self) -> int:
        """Rows of the batch that a picture takes."""
        return 2 if self.guided else 1


def plan_batches(counts: Sequence[int], kinds: Sequence[Kind], batch_size: int) -> list[Batch]:
    """Batches that draw counts[i] pictures of request i, none with more rows than `batch_size` pictures of one prompt.

    Requests share a batch if each has equally many pictures of the same kind in it; the rows of each are padded to
    whole groups.
    """
    batches: list[Batch] = []
    open_batches: dict[tuple[int, Kind], Batch] = {}
    for request, (count, kind) in enumerate(zip(counts, kinds, strict=True)):
        most = max(1, batch_size // kind.rows)
        for first in range(0, count, most):
            part = Part(request, range(first, min(first + most, count)))
            key = (len(part.pictures), kind)
            batch = open_batches.get(key)
            if batch is None or (len(batch) + 1) * whole_groups(len(part.pictures)) > whole_groups(most):
                batch = open_batches[key] = []
                batches.append(batch)
            batch.append(part)
    return batches


def whole_groups(rows: int) -> int:
    """Rows rounded up to whole groups, as attention computes them."""
    return -(-rows // ROW_GROUP) * ROW_GROUP


def halve(batch: Batch) -> list[Batch]:
    """Two batches with half the pictures each; MemoryError if there is only one picture."""
    if len(batch) > 1:
        return [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
    request, pictures = batch[0]
    if len(pictures) == 1:
        raise MemoryError("not enough memory to draw even one picture; close other programs or take a smaller model")
    middle = len(pictures) // 2
    return [[Part(request, pictures[:middle])], [Part(request, pictures[middle:])]]


def halve_large(failed: Batch, waiting: Sequence[Batch], kinds: Sequence[Kind]) -> list[Batch]:
    """Halve a batch that did not fit into memory, and those waiting that have as many rows and several pictures."""

    def rows(batch: Batch) -> int:
        return num_pictures(batch) * kinds[batch[0].request].rows

    batches = halve(failed)
    for batch in waiting:
        batches += halve(batch) if rows(batch) >= rows(failed) and num_pictures(batch) > 1 else [batch]
    return batches


def num_pictures(batch: Batch) -> int:
    return sum(len(part.pictures) for part in batch)


def picture_bytes(config: DalleConfig, dtype: torch.dtype) -> int:
    """Bytes that decoding keeps for one picture: keys and values in `dtype`, inputs of token shift in float32."""
    cells = sum(window_of(config, kind).cells for kind in config.layer_kinds)
    kept = 2 * cells * config.num_heads * config.head_size * dtype.itemsize
    shifted = config.num_layers * config.image_side * config.hidden_size * 4 if config.token_shift else 0
    return kept + shifted


def default_batch_size(
    config: DalleConfig, dtype: torch.dtype, device: torch.device, prompts: int = 1, idle_bytes: int = 0
) -> int:
    """Pictures of each of `prompts` that together fit into half of the free memory: 8 to 128, in groups of 8.

    idle_bytes: held by an earlier batch's cache, which gives way to this one.
    """
    usable_bytes = (free_bytes(device) + idle_bytes) * SHARE_OF_FREE_MEMORY
    fitting = int(usable_bytes / prompts) // picture_bytes(config, dtype)
    return max(ROW_GROUP, min(LARGEST_BATCH, fitting // ROW_GROUP * ROW_GROUP))
