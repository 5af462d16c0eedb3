"""Held-out rows: kept out of the training, to measure on."""

import hashlib
import heapq
import re
from pathlib import PurePosixPath

from training.data.catalog import ShardSet
from training.data.reader import Rows, join, read_keys, read_places, undamaged

FEWEST_SHARDS = 16
"""Shards that are searched at least."""
CANDIDATES = 2
"""The search for held-out rows goes on until there are this many for each that is wanted."""


def key_hash(key: str) -> int:
    """A pseudorandom number in 0..2**64-1, the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def picture_hash(key: str) -> int:
    """The `key_hash` of the picture of a row: all its views, whose keys end in #1, #2, ..., have the same."""
    return key_hash(re.sub(r"#[0-9]+$", "", key))


def is_heldout(key: str, share: float) -> bool:
    """Whether the row with this key is held out, as are all views of its picture."""
    return picture_hash(key) < share * 2**64


def mixed(shards: ShardSet) -> list[int]:
    """The numbers of the shards in the order of their names' hashes, so that the first ones are representative."""
    return sorted(range(len(shards.paths)), key=lambda number: key_hash(PurePosixPath(shards.paths[number]).name))


def heldout_rows(shards: ShardSet, share: float, count: int, fewest_shards: int = FEWEST_SHARDS) -> Rows:
    """At most `count` of the held-out rows, a `share` of all (1: all rows), the same every time.

    Shards are searched in the order of their names' hashes until enough rows are found, `fewest_shards` at least, so
    that a large data set is not read whole. Of the rows found, those whose pictures have the smallest hashes are taken:
    a fair sample of these shards, in whatever order they are listed.
    """
    if not share or not count:
        return Rows.none()
    found: list[tuple[int, int, int]] = []
    for seen, number in enumerate(mixed(shards)):
        if seen >= fewest_shards and len(found) >= CANDIDATES * count:
            break
        keys = (key for part in undamaged(shards, read_keys(shards, number)) for key in part)
        hashes = ((picture_hash(key), number, place) for place, key in enumerate(keys))
        found += [candidate for candidate in hashes if candidate[0] < share * 2**64]
    smallest = heapq.nsmallest(count, found)
    return pick_rows(shards, [(number, place) for _, number, place in smallest])


def pick_rows(shards: ShardSet, places: list[tuple[int, int]]) -> Rows:
    """The rows at (shard, row), in this order; those of a shard that is damaged are left out."""
    picked: dict[tuple[int, int], Rows] = {}
    for number in {number for number, _ in places}:
        wanted = sorted(place for shard, place in places if shard == number)
        parts = undamaged(shards, read_places(shards, number, wanted))
        rows = (part.take([at]) for part in parts for at in range(len(part)))
        picked |= zip(((number, place) for place in wanted), rows, strict=False)
    return join([Rows.none(), *(picked[at] for at in places if at in picked)])
