"""Held-out rows: excluded from training, to measure on."""

import hashlib
import heapq
import re
from pathlib import PurePosixPath

from preprocessing.shards.files import Rows, join
from training.data.catalog import ShardSet
from training.data.reader import read_keys, read_rows_at, undamaged

FEWEST_SHARDS = 16
"""Search at least this many shards."""
CANDIDATES = 2
"""Search until this many candidates are found for each row wanted."""


def key_hash(key: str) -> int:
    """Hash a key to 0..2**64-1, the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def picture_hash(key: str) -> int:
    """The `key_hash` of a row's picture, the same for all its views, whose keys end in #1, #2, ..."""
    return key_hash(re.sub(r"#[0-9]+$", "", key))


def is_heldout(key: str, share: float) -> bool:
    """Whether the row with this key is held out; all views of a picture are, or none."""
    return picture_hash(key) < share * 2**64


def by_name_hash(shards: ShardSet) -> list[int]:
    """Shard indices ordered by the hash of the file name, so that the first ones are representative."""
    return sorted(range(len(shards.paths)), key=lambda index: key_hash(PurePosixPath(shards.paths[index]).name))


def heldout_rows(shards: ShardSet, share: float, count: int, fewest_shards: int = FEWEST_SHARDS) -> Rows:
    """Choose at most `count` of the held-out rows, which are `share` of all rows (1: all); the same every time.

    Shards are searched in order of their names' hashes until enough rows are found, but at least `fewest_shards`, so
    that a large data set is not read whole. Of the rows found, those with the smallest picture hashes are taken: a
    fair sample of these shards, whatever order they are listed in.
    """
    if not share or not count:
        return Rows.none()
    found: list[tuple[int, int, int]] = []
    for searched, shard in enumerate(by_name_hash(shards)):
        if searched >= fewest_shards and len(found) >= CANDIDATES * count:
            break
        keys = (key for part in undamaged(shards, read_keys(shards, shard)) for key in part)
        found += [(picture_hash(key), shard, row) for row, key in enumerate(keys) if is_heldout(key, share)]
    smallest = heapq.nsmallest(count, found)
    return pick_rows(shards, [(shard, row) for _, shard, row in smallest])


def pick_rows(shards: ShardSet, chosen: list[tuple[int, int]]) -> Rows:
    """Read the rows (shard, row) in this order, without those lost to a damaged shard."""
    picked: dict[tuple[int, int], Rows] = {}
    for shard in {shard for shard, _ in chosen}:
        wanted = sorted(row for other, row in chosen if other == shard)
        parts = undamaged(shards, read_rows_at(shards, shard, wanted))
        rows = (part.take([index]) for part in parts for index in range(len(part)))
        picked |= zip(((shard, row) for row in wanted), rows, strict=False)
    return join([Rows.none(), *(picked[row] for row in chosen if row in picked)])
