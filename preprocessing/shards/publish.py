"""The files to publish of a folder of shards: its shards, a card and dataset.json."""

import json
from pathlib import Path

from dalle_lean.errors import UserError
from dalle_lean.io.model_card import CARD, markdown_table
from dalle_lean.io.publish import Files
from preprocessing.shards.files import shard_sha256
from preprocessing.shards.manifest import NAME, DatasetInfo, read_dataset_info


def shard_files(folder: Path, name: str, *, license: str = "unknown", license_link: str | None = None) -> Files:
    """The files of a folder of shards, dataset.json last; the card is the folder's README.md, if it has one. Raises
    UserError if a shard is missing or is not the one in dataset.json."""
    info = read_dataset_info(folder)
    for shard in info.shards:
        if shard_sha256(folder / shard.file) != shard.sha256:
            raise UserError(f"{folder / shard.file} has changed since it was written; see dalle-lean shards verify")
    readme = folder / CARD
    card = readme if readme.is_file() else dataset_card(info, name, license, license_link).encode()
    return {shard.file: folder / shard.file for shard in info.shards} | {CARD: card, NAME: folder / NAME}


def dataset_card(info: DatasetInfo, name: str, license: str, license_link: str | None) -> str:
    """A card in Markdown, with the hub's metadata, which tells `datasets` which files to load.

    license: an identifier that the hub knows, or any name with `license_link`.
    """
    fields = {"license": license}
    if license_link is not None:
        fields = {"license": "other", "license_name": license, "license_link": license_link}
    counts = info.counts
    rows = {
        "pictures": f"{counts.kept:,}",
        "rows": f"{info.num_rows:,}",
        "shards": f"{len(info.shards):,}",
        "seen in the source": f"{counts.seen:,}",
        **{f"left out: {reason}": f"{count:,}" for reason, count in counts.rejected.items()},
        "picture": f"{info.picture_side} x {info.picture_side} pixels",
        "its codes": f"{info.image_side} x {info.image_side} of {info.codebook_size:,}",
        "VQGAN that made the codes (SHA-256)": f"`{info.vqgan}`",
        "license": license if license_link is None else f"[{license}]({license_link})",
    }
    # A JSON string is also a YAML string.
    metadata = "\n".join(f"{field}: {json.dumps(value)}" for field, value in fields.items())
    return f"""---
{metadata}
pretty_name: {json.dumps(name)}
task_categories:
- text-to-image
tags:
- dalle-lean
configs:
- config_name: default
  data_files:
  - split: train
    path: "*.parquet"
---
# {name}

Pictures with captions, encoded by a VQGAN. The column `code` holds a picture's codes as int16, little-endian, in raster
order; `dataset.json` says what they mean and has the SHA-256 of every shard.

{markdown_table(rows)}

    from datasets import load_dataset

    rows = load_dataset("OWNER/NAME", split="train")

    dalle-lean train hf://datasets/OWNER/NAME RUN
"""
