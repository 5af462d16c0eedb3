"""CUDA tensors without a GPU: shapes, dtypes and devices are true, values are not there.

A tensor left on the CPU and anything that waits for values (`.item()`, `.tolist()`, `bool(tensor)`) raise.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dalle_lean.model.attention import window_mask
from dalle_lean.model.fused_attention import pattern_of


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Within it, device="cuda" makes fake tensors. Backward needs a driver."""
    clear_caches()
    try:
        with FakeTensorMode(), torch.no_grad():
            yield
    finally:
        clear_caches()  # of fake tensors, which mean nothing outside


def clear_caches() -> None:
    window_mask.cache_clear()
    pattern_of.cache_clear()


def moved(module: nn.Module) -> nn.Module:
    """The module with fake CUDA tensors for weights and buffers; call it within `fake_cuda`."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = nn.Parameter(emptied(weight), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = emptied(buffer)
    return module


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
