"""Golden data: numbers that the public reference implementations computed (tests/golden/README.md)."""

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from dalle_lean import DalleConfig

GOLDEN = Path(__file__).parent / "golden"
DALLE_FIXTURES = ("dalle_tiny_shift_conv14", "dalle_tiny_plain_conv14", "dalle_tiny_shift", "dalle_tiny_plain")


@cache
def tensors(name: str) -> dict[str, Tensor]:
    """The tensors of one fixture; not to be changed in place."""
    stored = load(lzma.decompress((GOLDEN / f"{name}.safetensors.xz").read_bytes()))
    for key, same in facts(name).get("same_tensors", {}).items():
        stored[key] = tensors(facts(name)["same_tensors_as"])[same]
    return stored


@cache
def facts(name: str) -> dict[str, Any]:
    """The JSON of one fixture."""
    path = GOLDEN / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def state_dict(name: str) -> dict[str, Tensor]:
    """The published state dict of one DALL-E fixture, aliases restored."""
    stored = {key.removeprefix("state."): value for key, value in tensors(name).items() if key.startswith("state.")}
    return {**stored, **{alias: stored[key] for alias, key in facts(name)["aliases"].items()}}


def generation(name: str) -> str:
    """Which generation of key names a DALL-E fixture has."""
    return "fork" if facts(name)["version"] == "fork" else "1.4"


def config(name: str) -> DalleConfig:
    """The DalleConfig of one DALL-E fixture."""
    sizes = facts(name)["config"]
    return DalleConfig(
        text_vocab_size=sizes["num_text_tokens"],
        text_len=sizes["text_seq_len"],
        image_vocab_size=sizes["num_image_tokens"],
        image_side=sizes["fmap"],
        hidden_size=sizes["dim"],
        num_layers=sizes["depth"],
        num_heads=sizes["heads"],
        head_size=sizes["dim_head"],
        token_shift=sizes["shift_tokens"],
        conv_window="centred" if "1.4.2" in facts(name)["conv"] else "corner",
    )
