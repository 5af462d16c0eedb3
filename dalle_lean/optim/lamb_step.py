"""LAMB's update rule, and the step of one tensor in plain torch operations, on any device.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.optim.quantize8 import dequantize, quantize, zero_code

CHUNK_SIZE_PER_THREAD = 2**15
"""Elements per CPU thread: the temporaries stay in its cache, which makes the step several times faster."""
DEVICE_CHUNK_SIZE = 2**24
"""Elements that keep a GPU busy, with temporaries of a few hundred MB."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """The settings of one tensor's step; the corrections are the factors of bias correction."""

    lr: float
    beta_mean: float
    beta_square: float
    eps: float
    weight_decay: float
    clamp_weight_norm: float
    block_size: int
    mean_correction: float = 1.0
    square_correction: float = 1.0

    def step_size(self, weight_square_sum: float, update_square_sum: float, largest_square: float) -> float:
        """`lr` times the trust ratio. ValueError if weights or gradients are not finite."""
        if not all(map(math.isfinite, (weight_square_sum, update_square_sum, largest_square))):
            raise UserError("weights or gradients are not finite (or above 1e17); this tensor was not changed")
        weight_norm, update_norm = math.sqrt(weight_square_sum), math.sqrt(update_square_sum)
        if weight_norm == 0 or update_norm == 0:
            return self.lr
        return self.lr * min(weight_norm, self.clamp_weight_norm) / update_norm


def new_statistics(weight: Tensor, *, block_size: int | None) -> dict[str, Tensor]:
    """Zero moving averages for `weight`, on its device: bytes in blocks of `block_size`, or float32 if that is None."""
    if block_size is None:
        return {name: torch.zeros_like(weight, dtype=torch.float32) for name in ("mean", "square")}
    statistics = {}
    for name, signed in (("mean", True), ("square", False)):
        statistics[f"{name}_codes"] = torch.full_like(weight, zero_code(signed), dtype=torch.uint8)
        statistics[f"{name}_scales"] = torch.zeros(-(-weight.numel() // block_size), device=weight.device)
    return statistics


def step_plain(
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
    settings: StepSettings,
    chunk_size: int | None = None,
    total: Callable[[list[float]], list[float]] = list,
) -> None:
    """Update float `weight` [n] and the averages in `state` by `gradient` [n], in place.

    Two passes over chunks of about `chunk_size` elements, one for the norms and one for the update, so that no
    temporary is larger than a chunk. `total` sums numbers over the processes that have a shard of the tensor.
    """
    if chunk_size is None:
        on_cpu = weight.device.type == "cpu"
        chunk_size = CHUNK_SIZE_PER_THREAD * torch.get_num_threads() if on_cpu else DEVICE_CHUNK_SIZE

    def updated(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        averages = read(state, part, settings.block_size)
        return averages_and_update(weight[part], gradient[part], *averages, settings)

    weight_sum = update_sum = largest = 0.0
    for part in chunks(weight.numel(), chunk_size, settings.block_size):
        _, square, update = updated(part)
        sums = [weight[part].square().sum(dtype=torch.float64), update.square().sum(dtype=torch.float64)]
        weight_part, update_part, largest_part = torch.stack([*sums, square.max().double()]).tolist()
        weight_sum, update_sum = weight_sum + weight_part, update_sum + update_part
        largest = largest_part if math.isnan(largest_part) else max(largest, largest_part)
    step_size = settings.step_size(*total([weight_sum, update_sum, largest]))  # of `largest` only whether it is finite
    for part in chunks(weight.numel(), chunk_size, settings.block_size):
        mean, square, update = updated(part)
        weight[part].sub_(update, alpha=step_size)
        write(state, part, settings.block_size, mean, square)


def chunks(numel: int, chunk_size: int, block_size: int) -> Iterator[slice]:
    """Cut [0, numel) into parts of whole blocks, of at most `chunk_size` elements unless a block has more."""
    size = max(1, chunk_size // block_size) * block_size
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


def averages_and_update(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, settings: StepSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, square) before the step -> (mean, square, update) of the step; all [n]."""
    mean = settings.beta_mean * mean + (1 - settings.beta_mean) * gradient
    square = settings.beta_square * square + (1 - settings.beta_square) * gradient * gradient
    denominator = (square * settings.square_correction).sqrt() + settings.eps
    return mean, square, mean * settings.mean_correction / denominator + settings.weight_decay * weight


def read(state: dict[str, Any], part: slice, block_size: int) -> tuple[Tensor, Tensor]:
    """The moving averages (mean of the gradient, mean of its square) of a part, in float32."""
    if "mean" in state:
        return state["mean"].view(-1)[part], state["square"].view(-1)[part]
    blocks = blocks_of(part, block_size)
    codes = (state["mean_codes"].view(-1)[part], state["square_codes"].view(-1)[part])
    mean = dequantize(codes[0], state["mean_scales"][blocks], signed=True, block_size=block_size)
    square = dequantize(codes[1], state["square_scales"][blocks], signed=False, block_size=block_size)
    return mean, square


def write(state: dict[str, Any], part: slice, block_size: int, mean: Tensor, square: Tensor) -> None:
    """Inverse of `read`."""
    for name, values, signed in (("mean", mean, True), ("square", square, False)):
        if name in state:
            state[name].view(-1)[part] = values
        else:
            codes, scales = quantize(values, signed=signed, block_size=block_size)
            state[f"{name}_codes"].view(-1)[part] = codes
            state[f"{name}_scales"][blocks_of(part, block_size)] = scales


def blocks_of(part: slice, block_size: int) -> slice:
    """The blocks that a part of whole blocks covers."""
    return slice(part.start // block_size, -(-part.stop // block_size))
