"""The order of a pass over the rows of shards, and the position that a run resumes at without rereading the pass.

Each pass shuffles the shards and reads them in groups, side by side. A window takes the next chunk of rows of every
shard in the group and shuffles them together; the length of a shard's first chunk differs from pass to pass, so that
different rows share a window. A position is a few small numbers; resuming from it rereads at most one window (and the
rows before it in its Parquet row groups).
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in the data, as checkpoints store it: everything before it was used, nothing after it."""

    epoch: int = 0
    """Completed passes over the data."""
    group: int = 0
    """Completed groups of shards in this pass."""
    window: int = 0
    """Completed windows of this group."""
    sample: int = 0
    """Samples of this window already used."""
    lost: tuple[int, ...] = ()
    """Shards of this group found damaged, whose remaining rows this pass skips."""
    skipped: int = 0
    """Times a damaged shard was skipped, since the run began."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        return cls(**{**content, "lost": tuple(content["lost"])})


def shuffled(count: int, *seed: int) -> NDArray[np.intp]:
    """Shuffle the numbers 0..count-1 by the seed, the same with any version of numpy."""
    # NEP 19 fixes the stream of a bit generator for ever, but not what numpy's permutation makes of it.
    return np.random.PCG64(seed).random_raw(count).argsort(kind="stable")


def shard_groups(shards: int, side_by_side: int, seed: int, epoch: int) -> list[list[int]]:
    """The shards of a pass in shuffled order, `side_by_side` in each group."""
    order = shuffled(shards, seed, epoch).tolist()
    return [order[start : start + side_by_side] for start in range(0, shards, side_by_side)]


def first_chunk_rows(chunk: int, rows: int | None, seed: int, epoch: int, shard: int) -> int:
    """Length of a shard's first chunk: drawn from 1..chunk, or `chunk` if the shard has no more rows than that."""
    if rows is not None and rows <= chunk:
        return chunk
    return 1 + int(np.random.PCG64((seed, epoch, shard)).random_raw()) % chunk


def chunk_start(window: int, first: int, chunk: int) -> int:
    """The row where a shard's chunk for this window begins; its first chunk has `first` rows, the others `chunk`."""
    return first + (window - 1) * chunk if window else 0
