"""Mixes folders of shards into one; some may count several times, so that few pictures weigh as much as many."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.io.files import fresh_folder, link_or_copy
from preprocessing.shards.manifest import (
    Counts,
    DatasetInfo,
    Shard,
    check_room,
    read_dataset_info,
    write_dataset_info,
)

MIXED = "mixed"  # key in the settings of such a folder: how many times each source counts


def mix(sources: Sequence[tuple[Path, int]], out: Path) -> DatasetInfo:
    """Make `out`, a folder with the shards of `sources`, each as many times as its number says.

    Shards are hard links if the file system has them, else copies; the sources do not change.

    Raises:
        UserError: `out` exists; a source is no folder of shards; their codes are not of one VQGAN.
    """
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder")
    infos = [(folder, read_dataset_info(folder), times) for folder, times in sources]
    first_folder, first, _ = infos[0]
    for folder, info, times in infos:
        if code_format(info) != code_format(first):
            raise UserError(
                f"{folder} has codes of the VQGAN {info.vqgan[:12]}, {info.image_side} x {info.image_side} a picture; "
                f"{first_folder} of {first.vqgan[:12]}, {first.image_side} x {first.image_side}"
            )
        if times < 1:
            raise UserError(f"{folder}:{times}: must count at least once")
    check_room(shard.file for _, shard in mixed_shards(infos))
    total_times: Counter[str] = Counter()
    for folder, _, times in infos:
        total_times[str(folder)] += times
    shards: list[Shard] = []
    with fresh_folder(out) as fresh:
        for path, shard in mixed_shards(infos):
            link_or_copy(path, fresh / shard.file)
            shards.append(shard)
        mixed = replace(
            first,
            counts=total_counts([info.counts for _, info, times in infos for _ in range(times)]),
            shards=tuple(shards),
            settings={MIXED: dict(total_times)},
        )
        write_dataset_info(fresh, mixed)
        os.rename(fresh, out)
    return mixed


def mixed_shards(infos: Sequence[tuple[Path, DatasetInfo, int]]) -> Iterator[tuple[Path, Shard]]:
    """Each shard's path, and the shard as the mix names it."""
    for number, (folder, info, times) in enumerate(infos):
        for time in range(times):
            for shard in info.shards:
                yield folder / shard.file, replace(shard, file=f"{number:02d}-{time:04d}-{shard.file}")


def code_format(info: DatasetInfo) -> tuple[object, ...]:
    """What must agree for codes to mix."""
    return info.vqgan, info.image_side, info.codebook_size, info.picture_side


def total_counts(counts: Sequence[Counts]) -> Counts:
    rejected: Counter[str] = Counter()
    for one in counts:
        rejected.update(one.rejected)
    return Counts(
        seen=sum(one.seen for one in counts),
        kept=sum(one.kept for one in counts),
        rejected=dict(rejected),
        further_views=sum(one.further_views for one in counts),
    )
