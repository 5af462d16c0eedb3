"""The reference, dalle-pytorch 1.6.6: an interpreter that has it, and a function that both sides compute.

The package requires more than its model needs, and versions that can no longer be installed; the requirements listed
here suffice (with Python 3.11 and torch 2.15).
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dalle_lean import Dalle, DalleConfig
from dalle_lean.convert import to_dalle_pytorch
from dalle_lean.errors import UserError

REFERENCE = "dalle-pytorch"
REQUIREMENTS = (
    *("torch==2.15.0", "torchvision==0.29.2", "numpy==2.3.5", "setuptools<81", "safetensors==0.8.0", "einops==0.8.1"),
    *("rotary-embedding-torch==0.1.5", "axial-positional-embedding==0.2.1", "pytorch-lightning==1.9.5"),
    *("omegaconf", "requests", "pyyaml", "tqdm", "packaging", "pillow"),
)
WITHOUT_DEPENDENCIES = ("dalle-pytorch==1.6.6", "taming-transformers-rom1504==0.0.6")
COMPLETE = "complete"
"""The file that marks an environment as complete."""

SMALL = DalleConfig(
    text_vocab_size=4096,
    text_len=64,
    image_vocab_size=1024,
    image_side=16,
    hidden_size=256,
    num_layers=16,
    num_heads=4,
    head_size=64,
    conv_window="corner",  # what dalle-pytorch has had since 1.5.0
)
"""The model to compare."""
THEIR_KINDS = {"row": "axial_row", "column": "axial_col", "conv": "conv_like", "full": "full"}


def add_reference_options(parser: argparse.ArgumentParser) -> None:
    """Add --reference and --versus."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--reference", metavar="PYTHON", help="interpreter that has dalle-pytorch 1.6.6")
    either.add_argument(
        "--versus",
        action="store_true",
        help=f"install dalle-pytorch 1.6.6 into an environment of its own, {environment_folder()} (gigabytes)",
    )


def find_reference(options: argparse.Namespace) -> str | None:
    """The interpreter that the options name or install; None without them. UserError if there is none."""
    if options.versus:
        return make_environment(environment_folder())
    if options.reference is None:
        return None
    python = shutil.which(options.reference)
    if python is None:
        raise UserError(f"--reference {options.reference}: no such interpreter")
    return python


def environment_folder() -> Path:
    """The reference's environment, in the user's cache (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dalle_lean" / "dalle-pytorch-1.6.6"


def make_environment(folder: Path) -> str:
    """The interpreter of the environment in `folder`, which pip installs unless it is complete.

    UserError if pip fails; it says why on standard error.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (folder / COMPLETE).exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, *REQUIREMENTS],
            [*pip, "--no-deps", *WITHOUT_DEPENDENCIES],
        ):
            # Standard output is for the figures only.
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                raise UserError(f"cannot install dalle-pytorch into {folder}; the reason is above")
        (folder / COMPLETE).touch()
    return str(python)


def weights_of(config: DalleConfig) -> dict[str, Tensor]:
    """Fresh weights under dalle-pytorch's names, shared ones once, without the computed table of positions."""
    torch.manual_seed(0)
    published = to_dalle_pytorch(Dalle(config), "1.4")
    del published["transformer.pos_emb"]
    once = {value.data_ptr(): name for name, value in reversed(published.items())}
    return {name: published[name] for name in once.values()}


def random_batch(config: DalleConfig, size: int) -> dict[str, Tensor]:
    """Captions of random ids and random lengths, padded with zeros, and random codes."""
    generator = torch.Generator().manual_seed(1)
    text_ids = torch.randint(1, config.text_vocab_size, (size, config.text_len), generator=generator)
    lengths = torch.randint(1, config.text_len + 1, (size, 1), generator=generator)
    text_ids[torch.arange(config.text_len) >= lengths] = 0
    image_codes = torch.randint(config.image_vocab_size, (size, config.image_len), generator=generator)
    return {"text_ids": text_ids, "image_codes": image_codes}


def reference_task(config: DalleConfig) -> dict[str, Any]:
    """The arguments with which dalle_pytorch.DALLE computes the same function as `config`; UserError if none do."""
    if "conv" in config.layer_kinds and config.conv_window != "corner":
        raise UserError(f"conv_window={config.conv_window!r}: dalle-pytorch 1.6.6 has the window 'corner' only")
    arguments = {
        "dim": config.hidden_size,
        "depth": config.num_layers,
        "heads": config.num_heads,
        "dim_head": config.head_size,
        "num_text_tokens": config.text_vocab_size,
        "text_seq_len": config.text_len,
        "attn_types": [THEIR_KINDS[kind] for kind in config.layer_kinds],
        "shared_attn_ids": config.layer_blocks,
        "shared_ff_ids": config.layer_blocks,
        "share_input_output_emb": config.tie_embeddings,
        "shift_tokens": config.token_shift,
        "rotary_emb": config.rotary,
        "loss_img_weight": config.image_loss_weight,
        "reversible": config.reversible,
    }
    return {"arguments": arguments, "image_side": config.image_side, "image_vocab_size": config.image_vocab_size}
