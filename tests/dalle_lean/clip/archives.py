"""TorchScript archives as OpenAI's CLIPs are."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


class Holder(nn.Module):
    """Holds parameters and modules; torch.jit.script wants a method."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def write_archive(state: Mapping[str, Tensor], path: Path) -> None:
    """An archive of modules with these parameters, and OpenAI's three buffers of sizes."""
    root = Holder()
    for name, value in state.items():
        *modules, last = name.split(".")
        module = root
        for each in modules:
            if each not in dict(module.named_children()):
                module.add_module(each, Holder())
            module = module.get_submodule(each)
        module.register_parameter(last, nn.Parameter(value, requires_grad=False))
    for name in ("input_resolution", "context_length", "vocab_size"):
        root.register_buffer(name, torch.tensor(32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.save(torch.jit.script(root), str(path))
