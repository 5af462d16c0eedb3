"""The environment of the reference, dalle-pytorch 1.6.6: an interpreter of one's own, or one made from the registry.

The package asks for more than its model takes, and for versions that no longer install; what is listed here is enough
(with Python 3.11 and torch 2.15).
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from dalle_lean.errors import UserError

REFERENCE = "dalle-pytorch"
REQUIREMENTS = (
    "torch==2.15.0",
    "torchvision==0.29.2",
    "numpy==2.3.5",
    "setuptools<81",
    "safetensors==0.8.0",
    "einops==0.8.1",
    "rotary-embedding-torch==0.1.5",
    "axial-positional-embedding==0.2.1",
    "pytorch-lightning==1.9.5",
    "omegaconf",
    "requests",
    "pyyaml",
    "tqdm",
    "packaging",
    "pillow",
)
WITHOUT_THEIR_OWN = ("dalle-pytorch==1.6.6", "taming-transformers-rom1504==0.0.6")
"""Installed without what they ask for."""
COMPLETE = "complete"
"""The file that says that an environment has everything."""


def add_reference_options(parser: argparse.ArgumentParser) -> None:
    """--reference, or --versus with --environment."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--reference", metavar="PYTHON", help="interpreter that has dalle-pytorch 1.6.6")
    either.add_argument(
        "--versus", action="store_true", help="install dalle-pytorch 1.6.6 into an environment of its own (gigabytes)"
    )
    parser.add_argument(
        "--environment", metavar="FOLDER", type=Path, default=default_folder(), help="where (default: %(default)s)"
    )


def find_reference(options: argparse.Namespace) -> str | None:
    """The interpreter that the options name or make; None where they ask for none. ValueError where there is none."""
    if options.versus:
        return make_environment(options.environment)
    if options.reference is None:
        return None
    python = shutil.which(options.reference)
    if python is None:
        raise UserError(f"--reference {options.reference}: no such interpreter")
    return python


def default_folder() -> Path:
    """In the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dalle_lean" / "dalle-pytorch-1.6.6"


def make_environment(folder: Path) -> str:
    """The interpreter of the environment in `folder`, made first unless it is complete; what was begun is made anew.

    ValueError where pip cannot install; it says why on standard error.
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (folder / COMPLETE).exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, *REQUIREMENTS],
            [*pip, "--no-deps", *WITHOUT_THEIR_OWN],
        ):
            # Nothing but the figures belongs on standard output.
            if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
                raise UserError(f"dalle-pytorch could not be installed into {folder}; it says why above")
        (folder / COMPLETE).touch()
    return str(python)
