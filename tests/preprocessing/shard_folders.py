"""Folders of shards with codes of a VQGAN, and the published data set's kind of file."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from preprocessing.shards.files import Row, read_blocks, write_shard
from preprocessing.shards.manifest import Counts, DatasetInfo, read_dataset_info, write_dataset_info


def stored_rows(folder):
    """The rows of a finished folder: {"caption": str, "codes": int16 array [I], "key": str}, shard after shard."""
    info = read_dataset_info(folder)
    return read_rows([Path(folder) / shard.file for shard in info.shards], info.num_codes, info.codebook_size)


def read_rows(paths, num_codes, codebook_size):
    """The same, of some shards."""
    for path in paths:
        for rows in read_blocks(path, num_codes, codebook_size):
            for caption, codes, key in zip(rows.captions, rows.codes, rows.keys, strict=True):
                yield {"caption": caption, "codes": codes, "key": key}


def make_rows(codes, seed=0):
    """A row for each picture's codes [R, I], captions and keys numbered."""
    return [
        Row(
            caption=f"caption {index} é",
            codes=row.astype(np.int16),
            nsfw="UNLIKELY" if index % 2 else None,
            original_width=640,
            original_height=480,
            url=None,
            key=f"{seed}-{index}",
        )
        for index, row in enumerate(codes)
    ]


def random_codes(vqgan, count, seed=0):
    config = vqgan.config
    size = (count, config.image_side**2)
    return np.random.default_rng(seed).integers(0, config.codebook_size, size, dtype=np.int16)


def write_folder(folder, vqgan, parts, *, rejected=None):
    """A finished folder: one shard for each list of rows."""
    fingerprint = vqgan.fingerprint()
    shards = tuple(
        write_shard(folder / f"shard-{number:05d}.parquet", rows, vqgan=fingerprint)
        for number, rows in enumerate(parts)
    )
    kept, rejected = sum(map(len, parts)), rejected or {}
    info = DatasetInfo(
        vqgan=fingerprint,
        image_side=vqgan.config.image_side,
        codebook_size=vqgan.config.codebook_size,
        picture_side=vqgan.config.picture_side,
        counts=Counts(seen=kept + sum(rejected.values()), kept=kept, rejected=rejected),
        shards=shards,
    )
    write_dataset_info(folder, info)
    return folder


def write_published(path, codes, *, row_group_size=300):
    """A file as the published data set has them: more columns, other number types, several row groups."""
    count = len(codes)
    table = pa.table(
        {
            "caption": [f"a caption of {path.stem}, number {index}" for index in range(count)],
            "NSFW": ["UNLIKELY"] * count,
            "similarity": np.linspace(0, 1, count),
            "LICENSE": ["?"] * count,
            "url": ["http://x"] * count,
            "key": np.arange(count),
            "original_width": np.full(count, 640.0),
            "original_height": np.full(count, 480.0),
            "code": pa.array([row.astype("<i2").tobytes() for row in codes], pa.large_binary()),
        }
    )
    pq.write_table(table, path, compression="brotli", row_group_size=row_group_size)
