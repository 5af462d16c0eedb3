"""Weights in safetensors files, and filling a module with them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dalle_lean.errors import UserError
from dalle_lean.files import atomic_write


def save_weights(weights: Mapping[str, Tensor], path: Path, dtype: torch.dtype | None = torch.float32) -> None:
    """Write tensors as safetensors, atomically, floating-point ones in `dtype`; None: in their own."""
    stored = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous().clone()
        for name, tensor in weights.items()
    }
    with atomic_write(path) as temporary:
        save_file(stored, temporary)


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; a missing or damaged one is a ValueError that names it."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is not a safetensors file: {error}") from None


def load_strictly(module: nn.Module, weights: Mapping[str, Tensor], source: str, assign: bool = False) -> None:
    """Copy `weights` into `module`; a missing, unknown or misshapen key is a ValueError that names it and `source`.

    assign: make them the module's own instead, whatever device and dtype both have.
    """
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | weights.keys()):
        if name not in weights:
            raise UserError(f"{source}: missing key {name}")
        if name not in wanted:
            raise UserError(f"{source}: unknown key {name}")
        have, need = weights[name], wanted[name]
        if have.shape != need.shape:
            raise UserError(f"{source}: key {name} has shape {list(have.shape)}; must be {list(need.shape)}")
        if have.is_floating_point() != need.is_floating_point():
            raise UserError(f"{source}: key {name} has dtype {have.dtype}; must be {need.dtype}")
    module.load_state_dict(dict(weights), assign=assign)


def refuse_infinite(module: nn.Module, source: str) -> None:
    """ValueError for the first tensor of `module` with numbers that are not finite; names it and `source`."""
    for name, tensor in module.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise UserError(f"{source}: {name} holds numbers that are not finite")
