"""Imports published shards, which have no `dataset.json`: checks them and writes one."""

import math
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.progress import OnProgress, unwatched
from preprocessing.encoding.part_records import records_folder
from preprocessing.shards.files import open_shard, read_blocks, read_header, shard_sha256
from preprocessing.shards.manifest import (
    ADOPTED,
    NAME,
    SHARD_NAME,
    Counts,
    DatasetInfo,
    Shard,
    check_room,
    write_dataset_info,
)


def import_shards(folder: str | Path, vqgan: VQGAN, *, on_progress: OnProgress = unwatched) -> DatasetInfo:
    """Read every code of the Parquet files in `folder` and write the `dataset.json` that makes it a folder of shards.

    Assumes the codes to be of `vqgan`, since few files tell; `shards show` lets people check. All pictures must have
    as many codes as the first one, all in the range of the VQGAN's codebook. Progress counts pictures.

    Raises UserError for a folder that has a `dataset.json` or no Parquet files, and for a file that is no shard or has
    codes of another VQGAN.
    """
    folder = Path(folder)
    if (folder / NAME).exists():
        raise UserError(f"{folder} has a {NAME} already")
    if records_folder(folder).exists():
        raise UserError(f"{folder} is the unfinished output of dalle-lean preprocess; finish that run")
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise UserError(f"{folder} holds no Parquet files")
    check_room(path.name for path in paths)
    if wrong := [path.name for path in paths if not SHARD_NAME.fullmatch(path.name)]:
        raise UserError(f"{folder}: {wrong[0]!r} is no name for a shard; use letters, digits, '.', '_' and '-'")
    rows: dict[Path, int] = {}
    for path in paths:
        header = read_header(path)
        if header.vqgan is not None:
            vqgan.check_reads(header.vqgan, f"{path}: its codes are")
        if not header.rows:
            raise UserError(f"{folder}: {path.name} has no rows")
        rows[path] = header.rows
    image_side = first_image_side(paths[0])
    total, done, shards = sum(rows.values()), 0, []
    for path in paths:
        for batch in read_blocks(path, image_side**2, vqgan.config.codebook_size):
            done += len(batch)
            on_progress(done, total, path.name)
        shards.append(Shard(file=path.name, rows=rows[path], sha256=shard_sha256(path)))
    info = DatasetInfo(
        vqgan=vqgan.codes_fingerprint(),
        image_side=image_side,
        codebook_size=vqgan.config.codebook_size,
        picture_side=image_side * vqgan.config.downscale,
        counts=Counts(seen=total, kept=total),
        shards=tuple(shards),
        settings={ADOPTED: True},
    )
    write_dataset_info(folder, info)
    return info


def first_image_side(path: Path) -> int:
    """Codes along one side of the first picture of a shard."""
    with open_shard(path) as file:
        batch = next(file.iter_batches(batch_size=1, columns=["code"]), None)
        if batch is None:
            raise UserError(f"it has 0 of its {file.metadata.num_rows} rows")
        code = batch.column("code")[0].as_py()
    size = len(code) if isinstance(code, bytes) else 0
    side = math.isqrt(size // 2)
    if side < 1 or 2 * side**2 != size:
        raise UserError(f"{path}: the first picture has {size} bytes of codes; must be 2 for each of a square number")
    return side
