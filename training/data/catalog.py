"""Where the shards of a data set are, on this machine or another, and what their codes mean."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import MOST_BYTES, parse, sha256_file
from dalle_lean.io.parquet_footer import check_footer
from dalle_lean.io.remote_errors import storage_of
from dalle_lean.require import require
from preprocessing.shards.files import Counts, DatasetInfo, parse_manifest, read_dataset_info
from training.data.remote_io import Patience, RemoteFile, silent
from training.run.progress import OnNotice

HUB = "hf://datasets/"


@dataclass(frozen=True)
class Codes:
    """What the codes of a data set without `dataset.json` are; the published one has none."""

    image_side: int
    codebook_size: int
    vqgan: str
    """Fingerprint of the VQGAN that made them."""
    picture_side: int
    """Pixels along one side of a picture."""


@dataclass
class Reading:
    """What is being read at this moment, for whoever waits for it."""

    path: str = "the list of shards"


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """The shards of one data set, in an order that is always the same.

    Args:
        name: for messages.
        paths: a local path or a URL of each.
        rows: of each; None where it is not known before it is read.
        info: what the codes mean.
        fingerprint: SHA-256 that changes with the data.
        patience: with what is on another machine.
        on_notice: told of damage, and of what is waited for.
        reading: kept up to date by who reads.
    """

    name: str
    paths: tuple[str, ...]
    rows: tuple[int | None, ...]
    info: DatasetInfo
    fingerprint: str
    patience: Patience = field(default_factory=Patience)
    on_notice: OnNotice = silent
    reading: Reading = field(default_factory=Reading, compare=False)

    @contextmanager
    def open(self, index: int) -> Iterator[Any]:
        """Shard `index` as pyarrow takes it; ValueError where it does not end as Parquet does."""
        path = self.paths[index]
        with RemoteFile(path, self.patience, self.on_notice) if is_url(path) else open(path, "rb") as file:
            check_footer(file)
            yield file if is_url(path) else path


def find_shards(
    source: str | Path,
    *,
    codes: Codes | None = None,
    patience: Patience | None = None,
    on_notice: OnNotice = silent,
) -> ShardSet:
    """The shards of `source`, a folder or the URL of one; nothing of them is read yet.

    Args:
        source: URLs are fsspec's (https://..., s3://..., hf://datasets/OWNER/NAME). A data set of the hub may lack a
            `dataset.json`, as the published one does; then `datasets` finds its files.
        codes: what the codes mean where no `dataset.json` says it.

    Raises ValueError for what is no data set or does not say what its codes mean, Unreachable for a remote that fails.
    """
    name, patience = str(source).rstrip("/"), patience or Patience()
    if not is_url(name):
        info = read_dataset_info(source)
        paths = tuple(str(Path(source) / shard.file) for shard in info.shards)
        fingerprint = sha256_file(Path(source) / "dataset.json")
    else:
        try:
            content = patience.insist(name, partial(read_file, f"{name}/dataset.json"), on_notice)
        except FileNotFoundError:
            if codes is None or not name.startswith(HUB):
                raise UserError(
                    f"{name} has no dataset.json; to train on a data set of the hub without one, say what its codes "
                    "are: --vqgan, and a recipe whose [model] has image_side and image_vocab_size"
                ) from None
            paths = patience.insist(name, partial(published_files, name.removeprefix(HUB)), on_notice)
            return undescribed(name, paths, codes, patience, on_notice)
        info = read_info(name, content)
        paths = tuple(f"{name}/{shard.file}" for shard in info.shards)
        fingerprint = hashlib.sha256(content).hexdigest()
    return ShardSet(
        name=name,
        paths=paths,
        rows=tuple(shard.rows for shard in info.shards),
        info=info,
        fingerprint=fingerprint,
        patience=patience,
        on_notice=on_notice,
    )


def is_url(source: str) -> bool:
    return "://" in source


def read_file(url: str) -> bytes:
    """The content of a small remote file."""
    files, path = storage_of(url, extra="training")
    content: bytes = files.cat_file(path, start=0, end=MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UserError(f"{url} has more than {MOST_BYTES:,} bytes: it is no dataset.json")
    return content


def read_info(name: str, content: bytes) -> DatasetInfo:
    """A remote `dataset.json`; ValueError where it is none."""
    path = f"{name}/dataset.json"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: {error}") from None
    return parse_manifest(parse(json.loads, text, f"{path} is not JSON"), path)


def published_files(name: str) -> tuple[str, ...]:
    """The files of a data set's training split as `datasets` resolves its name: URLs that hold their revision."""
    try:
        builder = require("datasets", extra="training").load_dataset_builder(name)
    except ValueError as error:
        raise UserError(f"{HUB}{name}: {' '.join(str(error).split())}") from None
    return tuple(str(path) for path in (builder.config.data_files or {}).get("train", ()))


def undescribed(name: str, paths: tuple[str, ...], codes: Codes, patience: Patience, on_notice: OnNotice) -> ShardSet:
    """A data set of which only the files and the meaning of the codes are known."""
    if not paths or not all(path.endswith(".parquet") for path in paths):
        raise UserError(f"{name}: its training split is not made of Parquet files")
    info = DatasetInfo(
        vqgan=codes.vqgan,
        image_side=codes.image_side,
        codebook_size=codes.codebook_size,
        picture_side=codes.picture_side,
        counts=Counts(),
        shards=(),
    )
    return ShardSet(
        name=name,
        paths=paths,
        rows=(None,) * len(paths),
        info=info,
        fingerprint=hashlib.sha256("\n".join(paths).encode()).hexdigest(),
        patience=patience,
        on_notice=on_notice,
    )
