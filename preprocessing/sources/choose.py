"""The source that a path or a name stands for."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from dalle_lean.errors import UserError
from dalle_lean.images.files import PICTURE_SUFFIXES
from dalle_lean.images.image_folder import LISTING
from dalle_lean.io.remote_io import Unreachable
from preprocessing.sources.columns import NoPictures, OnlyAddresses
from preprocessing.sources.files import list_files
from preprocessing.sources.folder import CaptionedFolder, ListedFolder
from preprocessing.sources.hub import SavedDataset, StreamedDataset
from preprocessing.sources.parquet import ParquetShards
from preprocessing.sources.sample import Source
from preprocessing.sources.tar import TarShards

TAKES = (
    "a source is a folder of captioned pictures, WebDataset tars or Parquet (folder, file or pattern), a folder from "
    "save_to_disk, or owner/name on the hub"
)
SHARD_SUFFIXES = {".tar": "tar", ".parquet": "Parquet"}
"""Kinds of shards by suffix. A folder is of the first kind that is in it, and so is a pattern that matches more."""
CONTACT_SHEET = "contact_sheet.png"
"""What `shards show` writes; no picture of a source."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def open_source(
    source: str | Path,
    part_rows: int,
    *,
    split: str = "train",
    config: str | None = None,
    picture_column: str | None = None,
    caption_column: str | None = None,
) -> Source:
    """The source that a path, a pattern or a name stands for; UserError if there is nothing to read.

    A source that is not in shards is cut into parts of `part_rows` samples. `split` and `config` select from a data set
    on the hub; `picture_column` and `caption_column` name the columns of tables with unusual names.
    """
    if part_rows < 1:
        raise UserError(f"part_rows={part_rows}: must be positive")
    columns = {"picture_column": picture_column, "caption_column": caption_column}
    text = str(source)
    if "://" not in text and Path(text).is_dir():
        return open_folder(Path(text), part_rows, columns)
    if "://" in text or "*" in text or "{" in text or Path(text).is_file():
        paths = [text] if Path(text).is_file() else list_files(text)
        others = [path for path in paths if not path.endswith(tuple(SHARD_SUFFIXES))]
        if "*" in text:
            # It may match more than shards: img2dataset writes statistics beside each. Local folders come first.
            matched = first_kind(paths)
            has_folder = any(Path(path).is_dir() for path in others)
            paths = matched if matched and not has_folder else shards_in(text) or matched
        elif others:
            paths = shards_in(text)
        if not paths:
            raise UserError(f"{text}: no {' or '.join(SHARD_SUFFIXES.values())} file there; {TAKES}")
        return open_shards(paths, columns)
    if HUB_NAME.fullmatch(text):
        try:
            return StreamedDataset(text, config=config, split=split, **columns)
        except OSError as error:
            raise Unreachable(
                f"{text}: no such folder or file here, and the hub cannot be reached to look there"
            ) from error
    raise UserError(f"{text}: no such folder or file; {TAKES}")


def open_folder(folder: Path, part_rows: int, columns: Mapping[str, str | None]) -> Source:
    if (folder / "dataset.json").is_file():
        others = (folder / LISTING).is_file() or has_pictures(folder)
        delete = f"to preprocess its pictures, first delete dataset.json, shard-*.parquet and {CONTACT_SHEET} in it; "
        raise UserError(
            f"{folder} holds shards of codes, which are preprocessed already; {delete if others else ''}{TAKES}"
        )
    if (folder / LISTING).is_file():
        return ListedFolder(folder, part_rows)
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        return SavedDataset(folder, part_rows, **columns)
    for listing in (LISTING, "state.json"):
        if nested := sorted(str(path.parent) for path in folder.glob(f"*/{listing}")):
            # Naming the parent must not mix splits such as held-out pictures.
            raise UserError(f"{folder} has no {listing}, but folders in it do: name one of {', '.join(nested)}")
    if paths := shards_in(str(folder)):
        try:
            return open_shards(paths, columns)
        except NoPictures:
            # img2dataset writes a table without pictures beside each folder of pictures.
            if not has_pictures(folder):
                raise
    if not has_pictures(folder):
        raise UserError(f"{folder} holds no pictures and no {' or '.join(SHARD_SUFFIXES.values())} files; {TAKES}")
    return CaptionedFolder(folder, part_rows)


def open_shards(paths: list[str], columns: Mapping[str, str | None]) -> Source:
    """Tars, or Parquet files with pictures; NoPictures if they have none."""
    suffixes = {PurePosixPath(path).suffix for path in paths}
    if len(suffixes) > 1:
        raise UserError(f"{paths[0]}, ...: {' and '.join(SHARD_SUFFIXES.values())} files do not mix; {TAKES}")
    if suffixes == {".tar"}:
        return TarShards(paths)
    source = ParquetShards(paths, **columns)
    try:
        source.check_columns()
    except OnlyAddresses as error:
        raise OnlyAddresses(f"{error}. {how_to_download(paths)}") from None
    return source


def first_kind(paths: list[str]) -> list[str]:
    """The shards among files, all of one kind."""
    kinds = ([path for path in paths if path.endswith(suffix)] for suffix in SHARD_SUFFIXES)
    return next(filter(None, kinds), [])


def shards_in(folder: str) -> list[str]:
    """The shards in a local or remote folder, all of one kind."""
    if Path(folder).is_dir():  # its name may look like a pattern
        return sorted(first_kind([str(path) for path in Path(folder).iterdir()]))
    return first_kind(list_files(f"{folder.rstrip('/')}/*"))


def has_pictures(folder: Path) -> bool:
    """Whether there are pictures in or below a folder, other than a contact sheet of shards."""
    return any(path.suffix.lower() in PICTURE_SUFFIXES and path.name != CONTACT_SHEET for path in folder.rglob("*"))


def how_to_download(paths: list[str]) -> str:
    """The command that downloads the pictures of metadata such as LAION's."""
    where = paths[0] if len(paths) == 1 else str(PurePosixPath(paths[0]).parent)
    return (
        "To download the pictures of LAION's metadata first: "
        f"img2dataset --url_list {where} --input_format parquet --url_col URL --caption_col TEXT "
        "--output_format webdataset --output_folder PICTURES --image_size 256 --resize_mode keep_ratio "
        "--resize_only_if_bigger True --save_additional_columns '[\"NSFW\"]'"
    )
