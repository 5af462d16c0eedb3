"""Weights in safetensors files, and loading them into modules."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dalle_lean.errors import UserError
from dalle_lean.free_memory import free_ram_bytes
from dalle_lean.io.files import atomic_write
from dalle_lean.words import human_bytes

MOST_HEADER_BYTES = 2**24


def save_weights(weights: Mapping[str, Tensor], path: Path, dtype: torch.dtype | None = torch.float32) -> None:
    """Write tensors as safetensors, atomically, floating-point ones in `dtype` (None keeps theirs)."""
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous().clone()
        for name, tensor in weights.items()
    }
    with atomic_write(path) as temporary:
        save_file(stored, temporary)


def read_weights(path: Path, wanted: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError names a missing or damaged file.

    wanted: tensors with the required names and shapes, checked before any tensor is read; None checks nothing.
    """
    shapes = read_shapes(path)
    if wanted is not None:
        refuse_other_shapes(shapes, {name: tuple(tensor.shape) for name, tensor in wanted.items()}, str(path))
    size_bytes, free_bytes = path.stat().st_size, free_ram_bytes()
    if size_bytes > free_bytes:
        raise UserError(f"{path} has {human_bytes(size_bytes)}, and only {human_bytes(free_bytes)} of memory are free")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}") from None


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes by a safetensors file's header; ValueError unless the file is as large as the header says.

    Source: https://huggingface.co/docs/safetensors. A file starts with 8 bytes that hold the length of its header.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing")
    size_bytes = path.stat().st_size
    with open(path, "rb") as start:
        length = int.from_bytes(start.read(8), "little")
    if size_bytes < 8 or not 2 <= length <= min(size_bytes - 8, MOST_HEADER_BYTES):
        raise UserError(f"{path} is not a safetensors file: its header cannot have {length:,} bytes")
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a safetensors file: {error} (it has {size_bytes:,} bytes); get a complete copy"
        ) from None


def refuse_other_shapes(have: Mapping[str, tuple[int, ...]], need: Mapping[str, tuple[int, ...]], source: str) -> None:
    """ValueError names `source` and the first key that is missing, unknown or misshapen."""
    for name in sorted(need.keys() | have.keys()):
        if name not in have:
            raise UserError(f"{source}: missing key {name}")
        if name not in need:
            raise UserError(f"{source}: unknown key {name}")
        if have[name] != need[name]:
            raise UserError(f"{source}: key {name} has shape {list(have[name])}; must be {list(need[name])}")


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], source: str, assign: bool = False) -> None:
    """Copy `weights` into `module`; ValueError names `source` and the first missing, unknown or misshapen key.

    assign: make these tensors the module's own instead, whatever their device and dtype.
    """
    wanted = module.state_dict()
    have_shapes, need_shapes = ({name: tuple(value.shape) for name, value in two.items()} for two in (weights, wanted))
    refuse_other_shapes(have_shapes, need_shapes, source)
    for name, need in wanted.items():
        have = weights[name]
        if have.is_floating_point() != need.is_floating_point():
            raise UserError(f"{source}: key {name} has dtype {have.dtype}; must be {need.dtype}")
    module.load_state_dict(dict(weights), assign=assign)


def refuse_infinite(tensors: Mapping[str, Tensor], source: str) -> None:
    """ValueError names `source` and the first tensor with a number that is not finite."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise UserError(f"{source}: {name} holds numbers that are not finite")


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite. In most types the extremes tell, far faster than `isfinite`."""
    has_extremes = tensor.numel() > 0 and tensor.is_floating_point() and tensor.itemsize > 1
    tested = torch.stack(torch.aminmax(tensor)) if has_extremes else tensor  # both are NaN if any number is
    return bool(tested.isfinite().all())
