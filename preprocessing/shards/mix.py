"""Several folders of shards as one, some of them several times: a few pictures can count among many others."""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.io.files import fresh_folder
from preprocessing.shards.manifest import Counts, DatasetInfo, Shard, read_dataset_info, write_dataset_info

MIXED = "mixed"
"""In the settings of such a folder: how often each source was taken."""


def mix(sources: Sequence[tuple[Path, int]], out: Path) -> DatasetInfo:
    """Make `out`, a folder with the shards of `sources`, each so often as its number says.

    Shards are hard links where the file system has them, else copies; the sources stay as they are.

    Raises:
        UserError: `out` exists; a source is no folder of shards; their codes are not of one VQGAN.
    """
    if out.exists():
        raise UserError(f"{out} exists already; name a new folder")
    infos = [(folder, read_dataset_info(folder), times) for folder, times in sources]
    first_folder, first, _ = infos[0]
    for folder, info, times in infos:
        if meaning(info) != meaning(first):
            raise UserError(
                f"{folder} has codes of the VQGAN {info.vqgan[:12]}, {info.image_side} x {info.image_side} a picture; "
                f"{first_folder} of {first.vqgan[:12]}, {first.image_side} x {first.image_side}"
            )
        if times < 1:
            raise UserError(f"{folder}:{times}: must be once at least")
    shards: list[Shard] = []
    with fresh_folder(out) as fresh:
        for number, (folder, info, times) in enumerate(infos):
            for time in range(times):
                for shard in info.shards:
                    name = f"{number:02d}-{time:04d}-{shard.file}"
                    link(folder / shard.file, fresh / name)
                    shards.append(Shard(file=name, rows=shard.rows, sha256=shard.sha256))
        mixed = replace(
            first,
            counts=total_counts([(info.counts, times) for _, info, times in infos]),
            shards=tuple(shards),
            settings={MIXED: {str(folder): times for folder, _, times in infos}},
        )
        write_dataset_info(fresh, mixed)
        os.rename(fresh, out)
    return mixed


def meaning(info: DatasetInfo) -> dict[str, object]:
    """What the codes of a folder are."""
    names = ("vqgan", "image_side", "codebook_size", "picture_side")
    return {name: getattr(info, name) for name in names}


def total_counts(counts: Sequence[tuple[Counts, int]]) -> Counts:
    """Of all sources together, each counted so often as it is taken."""
    rejected: Counter[str] = Counter()
    for one, times in counts:
        rejected.update({reason: times * number for reason, number in one.rejected.items()})
    return Counts(
        seen=sum(times * one.seen for one, times in counts),
        kept=sum(times * one.kept for one, times in counts),
        rejected=dict(rejected),
        further_views=sum(times * one.further_views for one, times in counts),
    )


def link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where there can be no hard link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
