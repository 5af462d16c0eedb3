"""The order of a pass over the rows of shards, and the position that a run resumes at without reading what came before.

The shards of a pass are shuffled and taken in groups, read side by side. A window has the next run of rows of every
shard of the group, shuffled together; where the first run of a shard ends differs from pass to pass, so that other rows
meet. A position is a few small numbers; to resume from it no more is read again than one window (and what precedes it
in its Parquet row groups).
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Position:
    """A position in the data, as checkpoints keep it: everything before it was given out, nothing after it."""

    epoch: int = 0
    """Whole passes over the data."""
    group: int = 0
    """Groups of shards of this pass that are done."""
    window: int = 0
    """Windows of this group that are done."""
    sample: int = 0
    """Samples of this window that were given out."""
    lost: tuple[int, ...] = ()
    """Shards of this group that turned out damaged: they give nothing more in this pass."""
    skipped: int = 0
    """How often a damaged shard was passed over, since the beginning."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        return cls(**{**content, "lost": tuple(content["lost"])})


def shuffled(count: int, *seed: int) -> NDArray[np.intp]:
    """The numbers 0..count-1 in an order that follows from the seed, with any version of numpy."""
    # The stream of a bit generator is fixed for ever (NEP 19); what numpy's own permutation makes of it is not.
    return np.random.PCG64(seed).random_raw(count).argsort(kind="stable")


def shard_groups(shards: int, side_by_side: int, seed: int, epoch: int) -> list[list[int]]:
    """The shards of a pass in its order, `side_by_side` in a group."""
    order = shuffled(shards, seed, epoch).tolist()
    return [order[start : start + side_by_side] for start in range(0, shards, side_by_side)]


def first_run(run: int, rows: int | None, seed: int, epoch: int, shard: int) -> int:
    """Rows of a shard in the first window of its group, 1..run; all where its `rows` are no more than that."""
    if rows is not None and rows <= run:
        return run
    return 1 + int(np.random.PCG64((seed, epoch, shard)).random_raw()) % run


def run_start(window: int, first: int, run: int) -> int:
    """The row where a shard's run of this window begins, if its first run has `first` rows and the others `run`."""
    return first + (window - 1) * run if window else 0


def window_order(rows: int, seed: int, position: Position) -> NDArray[np.intp]:
    """The order of the rows of the window at `position`."""
    return shuffled(rows, seed, position.epoch, position.group, position.window)
