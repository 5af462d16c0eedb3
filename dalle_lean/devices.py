"""Choice of the device, and what it can do."""

import os
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import torch

from dalle_lean.errors import UserError


def pick_device(device: str | torch.device) -> torch.device:
    """The named device; "auto" is CUDA if there is a GPU, else the CPU. ValueError if it is not usable here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError:
        picked = torch.device("meta")
    if picked.type not in ("cpu", "cuda"):
        raise UserError(f"device={str(device)!r}: it must be auto, cpu, cuda or cuda:N")
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={str(device)!r}: no CUDA device is usable here; use cpu")
    if picked.index is not None and picked.type == "cuda" and picked.index >= torch.cuda.device_count():
        raise UserError(f"device={str(device)!r}: there are only {torch.cuda.device_count()} CUDA devices here")
    return picked


@cache
def fused_attention_runs(device: torch.device) -> bool:
    """Whether the kernel of `model.fused_attention` runs there: on a GPU of compute capability 8.0 or newer, with
    Triton, and with the C compiler and Python's headers that Triton needs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    compiler = os.environ["CC"] if "CC" in os.environ else which("gcc") or which("clang")
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    return find_spec("triton") is not None and bool(compiler) and has_headers
