"""The files of a model folder to publish, with a generated card if it has none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dalle_lean.io.model_folder import check_parts, hashed_parts
from dalle_lean.io.publish import Files
from dalle_lean.memory.parameters import parameters
from dalle_lean.model.config import DalleConfig

CARD = "README.md"


def model_files(folder: Path, name: str, facts: Mapping[str, str] | None = None) -> Files:
    """The files of a model folder, config.json last. If it has no card, one is generated that also lists `facts`.
    ValueError if a part is missing or altered."""
    content = check_parts(folder)
    card = folder / CARD if (folder / CARD).is_file() else model_card(name, content, facts or {}).encode()
    parts = {part: folder / part for part in hashed_parts(folder)}
    return {**parts, CARD: card, "config.json": folder / "config.json"}


def model_card(name: str, content: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """Markdown with the hub's metadata, from the `content` of config.json."""
    config = DalleConfig.from_dict(content["dalle"])
    rows = {
        "parameters": f"{parameters(config):,}",
        "layers, width": f"{config.num_layers}, {config.hidden_size}",
        "caption": f"at most {config.text_len} of {config.text_vocab_size:,} tokens",
        "picture": f"{config.image_side} x {config.image_side} of {config.image_vocab_size:,} codes",
        "VQGAN that made the codes": f"`{content.get('vqgan_fingerprint') or 'not recorded'}`",
        **facts,
    }
    return f"""---
library_name: dalle-lean
pipeline_tag: text-to-image
tags:
- dalle-lean
---
# {name}

A transformer that draws pictures from captions; `config.json` has the SHA-256 of every part.

{markdown_table(rows)}

    dalle-lean generate "a red heart" --model FOLDER_OR_HUB_ID --out out

dalle-lean follows ["Training Transformers Together"](https://arxiv.org/abs/2207.03481) (Borzunov et al., 2022).
"""


def markdown_table(rows: Mapping[str, str]) -> str:
    """A table of two columns; Markdown and HTML in its cells are escaped."""
    lines = (f"| {cell(name)} | {cell(value)} |" for name, value in rows.items())
    return "\n".join(("| | |", "| --- | --- |", *lines))


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
