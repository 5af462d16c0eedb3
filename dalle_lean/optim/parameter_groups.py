"""The parameter groups of optimizers."""

from typing import Any

from torch import nn


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
