"""Finds the shards of a data set, local or remote, and what their codes mean."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import parse, sha256_file
from dalle_lean.io.parquet_footer import check_footer
from dalle_lean.io.remote_io import Patience, RemoteFile, storage_of
from dalle_lean.progress import OnNotice, silent
from dalle_lean.require import require
from preprocessing.shards.manifest import MOST_MANIFEST_BYTES, DatasetInfo, parse_manifest, read_dataset_info

HUB = "hf://datasets/"
BUFFER_BYTES = 2**20
"""Bytes buffered per column, which bounds the memory of an open shard of any size."""


@dataclass(kw_only=True)
class ShardSet:
    """The shards of one data set, always in the same order.

    Args:
        name: for messages.
        paths: the local path or URL of each shard.
        rows: rows of each shard; None if unknown until it is read.
        info: what the codes mean.
        fingerprint: SHA-256 that changes with the data.
        patience: how long to retry remote reads.
        on_notice: called with a line about damage or a long wait.
        reading: what is being read, for messages about a long wait.
    """

    name: str
    paths: tuple[str, ...]
    rows: tuple[int | None, ...]
    info: DatasetInfo
    fingerprint: str
    patience: Patience = field(default_factory=Patience)
    on_notice: OnNotice = silent
    reading: str = "the list of shards"

    @contextmanager
    def open(self, index: int) -> Iterator[Any]:
        """Open shard `index` as a pyarrow ParquetFile; whatever goes wrong while it is open, also in the caller's
        block, is raised as DamagedShard: only read there."""
        from preprocessing.shards.files import naming_damage  # needs torch, which --help should not import

        parquet = require("pyarrow.parquet", extra="training")
        path, rows = self.paths[index], self.rows[index]
        with (
            naming_damage(path),
            RemoteFile(path, self.patience, self.on_notice) if is_url(path) else open(path, "rb") as content,
        ):
            check_footer(content)
            source = content if is_url(path) else path
            with parquet.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                if rows is not None and file.metadata.num_rows != rows:
                    raise UserError(f"it has {file.metadata.num_rows} rows, its data set says {rows}")
                yield file


def find_shards(
    source: str | Path,
    *,
    codes: DatasetInfo | None = None,
    patience: Patience | None = None,
    on_notice: OnNotice = silent,
) -> ShardSet:
    """Find the shards of `source`, a folder or its URL, without reading them.

    Args:
        source: URLs are fsspec's (https://..., s3://..., hf://datasets/OWNER/NAME). A hub data set may lack a
            `dataset.json`, as the published one does; the library `datasets` then finds its files.
        codes: what the codes mean if there is no `dataset.json`.

    Raises:
        ValueError: `source` is not a data set, or nothing says what its codes mean.
        Unreachable: a remote kept failing.
    """
    name, patience = str(source).rstrip("/"), patience or Patience()
    paths: tuple[str, ...] | None = None
    if not is_url(name):
        info = read_dataset_info(source)
        fingerprint = sha256_file(Path(source) / "dataset.json")
    else:
        try:
            content = patience.insist(name, partial(read_file, f"{name}/dataset.json"), on_notice)
            path = f"{name}/dataset.json"
            info = parse_manifest(parse(json.loads, content, f"{path} is not JSON"), path)
        except FileNotFoundError:
            if codes is None or not name.startswith(HUB):
                raise UserError(
                    f"{name} has no dataset.json; a data set of the hub without one needs --vqgan, and a recipe whose "
                    "[model] sets image_side and image_vocab_size"
                ) from None
            paths = patience.insist(name, partial(published_files, name.removeprefix(HUB)), on_notice)
            info = codes
            content = "\n".join(paths).encode()
        fingerprint = hashlib.sha256(content).hexdigest()
    rows: tuple[int | None, ...] = tuple(shard.rows for shard in info.shards)
    return ShardSet(
        name=name,
        paths=tuple(f"{name}/{shard.file}" for shard in info.shards) if paths is None else paths,
        rows=rows if paths is None else (None,) * len(paths),
        info=info,
        fingerprint=fingerprint,
        patience=patience,
        on_notice=on_notice,
    )


def is_url(source: str) -> bool:
    return "://" in source


def read_file(url: str) -> bytes:
    files, path = storage_of(url)
    content: bytes = files.cat_file(path, start=0, end=MOST_MANIFEST_BYTES + 1)
    if len(content) > MOST_MANIFEST_BYTES:
        raise UserError(f"{url} is larger than {MOST_MANIFEST_BYTES:,} bytes: it is not a dataset.json")
    return content


def published_files(name: str) -> tuple[str, ...]:
    """The files of a hub data set's training split, as URLs that pin the revision."""
    try:
        builder = require("datasets", extra="training").load_dataset_builder(name)
    except (ValueError, RuntimeError) as error:  # the latter for data sets that are programs
        raise UserError(f"{HUB}{name}: {' '.join(str(error).split())}") from None
    paths = tuple(str(path) for path in (builder.config.data_files or {}).get("train", ()))
    if not paths or not all(path.endswith(".parquet") for path in paths):
        raise UserError(f"{HUB}{name}: its training split holds files other than Parquet, or none")
    return paths
