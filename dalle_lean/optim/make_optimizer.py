"""Optimizers by their names in recipes, and their parameter groups."""

from typing import Any

import torch
from torch import nn

from dalle_lean.errors import UserError
from dalle_lean.memory.setup import OPTIMIZERS
from dalle_lean.optim.lamb import Lamb
from dalle_lean.optim.muon import MuonAdamW
from dalle_lean.require import require


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices decay; vectors (biases, LayerNorm and LayerScale weights) do not.

    A tied parameter is listed once.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.squeeze().ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.squeeze().ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def muon_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """`parameter_groups`, with the matrices of `model.blocks` as a separate first group."""
    matrices, vectors = parameter_groups(model, weight_decay)
    blocks = {id(parameter) for parameter in model.get_submodule("blocks").parameters() if parameter.ndim == 2}
    hidden = [parameter for parameter in matrices["params"] if id(parameter) in blocks]
    tables = [parameter for parameter in matrices["params"] if id(parameter) not in blocks]
    return [{**matrices, "params": hidden}, {**matrices, "params": tables}, vectors]


def make_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    *,
    lr: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.96),
    eps: float = 1e-6,
    **lamb_settings: Any,
) -> torch.optim.Optimizer:
    """An optimizer by name over the groups of `parameter_groups`, each with its `weight_decay`.

    "lamb" is Lamb, "adamw" torch's AdamW, "muon" MuonAdamW (over `muon_groups`), "adamw8bit" bitsandbytes' for small
    runs, whose 8-bit statistics do not keep exact zeros on a CPU: weights that never get a gradient drift a little.

    Raises:
        ValueError: an unknown name, or settings of Lamb for another optimizer.
        MissingPackage: "adamw8bit" without bitsandbytes.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer {name!r}: must be one of {', '.join(OPTIMIZERS)}")
    if name == "lamb":
        return Lamb(groups, lr=lr, betas=betas, eps=eps, **lamb_settings)
    if lamb_settings:
        raise UserError(f"{', '.join(lamb_settings)}: {name} has no such setting; leave it out or choose lamb")
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    if name == "muon":
        return MuonAdamW(groups, lr=lr, betas=betas, eps=eps)
    return require("bitsandbytes", "training").optim.AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
