"""`lamb_step.step_plain` compiled by numba, for 8-bit statistics on the CPU: the same step, many times faster.

Each thread takes a span of blocks and processes it twice: once for the norms and the new scales, once to update the
weights and write the codes. A block's numbers stay in the cache, so the passes move only 10 and 16 bytes an element.
Numba's own `parallel` is not used: two of its kernels at once, or one after a fork, may end the process.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dalle_lean.compiled import compiled
from dalle_lean.optim.lamb_step import StepSettings
from dalle_lean.optim.quantize8 import SMALLEST_SCALE, dynamic_map, nearest_code

SMALLEST_SPAN = 2**18
"""Elements below which a second thread is not worth its start."""

LANES = 64
"""Independent partial sums, which the compiler can vectorize without reordering them."""


@compiled()
def decode(codes, scale, values, out):
    for i in range(len(codes)):
        out[i] = values[codes[i]] * scale


@compiled()
def encode(numbers, scale, nearest, codes):
    """Codes by the upper 16 bits of number / scale, rounded; a scale of zero gives zeros."""
    inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
    for i in range(len(codes)):
        bits = np.float32(numbers[i] * inverse).view(np.uint32)
        codes[i] = nearest[(bits + np.uint32(0x8000)) >> np.uint32(16)]


@compiled()
def square_sum(numbers):
    """The sum of squares, in float32, by LANES partial sums."""
    sums = np.zeros(LANES, np.float32)
    whole = len(numbers) // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] += numbers[start + lane] * numbers[start + lane]
    for i in range(whole, len(numbers)):
        sums[0] += numbers[i] * numbers[i]
    return sums.sum()


@compiled()
def measure_block(weight, gradient, mean, square, constants):
    """(sum of weight squared, sum of update squared, new largest |mean|, new largest square) of a block.

    `mean` is overwritten by the update.
    """
    beta_mean, new_mean, beta_square, new_square, mean_correction, square_correction, eps, weight_decay = constants
    largest_mean = largest_square = np.uint32(0)
    for i in range(len(weight)):
        m = beta_mean * mean[i] + new_mean * gradient[i]
        s = beta_square * square[i] + new_square * (gradient[i] * gradient[i])
        mean[i] = m * mean_correction / (np.sqrt(s * square_correction) + eps) + weight_decay * weight[i]
        largest_mean = max(largest_mean, np.float32(m).view(np.uint32) & np.uint32(0x7FFFFFFF))
        largest_square = max(largest_square, np.float32(s).view(np.uint32) & np.uint32(0x7FFFFFFF))
    largest = np.uint32(largest_mean).view(np.float32), np.uint32(largest_square).view(np.float32)
    return square_sum(weight), square_sum(mean), largest[0], largest[1]


@compiled()
def move_block(weight, gradient, mean, square, constants, step_size):
    """Update a block's weight, mean and square in place."""
    beta_mean, new_mean, beta_square, new_square, mean_correction, square_correction, eps, weight_decay = constants
    for i in range(len(weight)):
        m = beta_mean * mean[i] + new_mean * gradient[i]
        s = beta_square * square[i] + new_square * (gradient[i] * gradient[i])
        mean[i] = m
        square[i] = s
        update = m * mean_correction / (np.sqrt(s * square_correction) + eps) + weight_decay * weight[i]
        weight[i] -= step_size * update


@compiled()
def measure_span(first, last, block_size, weight, gradient, averages, maps, measured, constants):
    """Fill rows `first` to `last` of `measured` [blocks, 4] with the results of `measure_block`."""
    mean, square = np.empty(block_size, np.float32), np.empty(block_size, np.float32)
    mean_codes, mean_scales, square_codes, square_scales = averages
    for b in range(first, last):
        start, stop = b * block_size, min((b + 1) * block_size, len(weight))
        count = stop - start
        decode(mean_codes[start:stop], mean_scales[b], maps[0], mean)
        decode(square_codes[start:stop], square_scales[b], maps[1], square)
        block = measure_block(weight[start:stop], gradient[start:stop], mean[:count], square[:count], constants)
        for i in range(4):
            measured[b, i] = block[i]


@compiled()
def move_span(first, last, block_size, weight, gradient, averages, maps, scales, constants, step_size):
    """Update blocks `first` to `last`; `scales` [2, blocks] are the new ones."""
    mean, square = np.empty(block_size, np.float32), np.empty(block_size, np.float32)
    mean_codes, mean_scales, square_codes, square_scales = averages
    for b in range(first, last):
        start, stop = b * block_size, min((b + 1) * block_size, len(weight))
        count = stop - start
        decode(mean_codes[start:stop], mean_scales[b], maps[0], mean)
        decode(square_codes[start:stop], square_scales[b], maps[1], square)
        move_block(weight[start:stop], gradient[start:stop], mean[:count], square[:count], constants, step_size)
        encode(mean[:count], scales[0, b], maps[2], mean_codes[start:stop])
        encode(square[:count], scales[1, b], maps[3], square_codes[start:stop])
        mean_scales[b], square_scales[b] = scales[0, b], scales[1, b]


def step_fused(weight: Tensor, gradient: Tensor, state: dict[str, Any], settings: StepSettings) -> None:
    """Update float32 `weight` [n] and the 8-bit averages in `state` by float32 `gradient` [n], in place, on the CPU.

    The result does not depend on the number of threads (torch's).
    """
    arrays = (weight.numpy(), gradient.numpy())
    names = ("mean_codes", "mean_scales", "square_codes", "square_scales")
    averages = tuple(state[name].view(-1).numpy() for name in names)
    num_blocks = len(averages[1])
    numbers = (
        settings.beta_mean, 1 - settings.beta_mean, settings.beta_square, 1 - settings.beta_square,
        settings.mean_correction, settings.square_correction, settings.eps, settings.weight_decay,
    )  # fmt: skip
    constants = tuple(np.float32(number) for number in numbers)
    measured = np.empty((num_blocks, 4), np.float32)
    in_spans(measure_span, num_blocks, settings.block_size, *arrays, averages, tables(), measured, constants)
    weight_sum, update_sum = measured[:, :2].sum(axis=0, dtype=np.float64)
    scales = np.ascontiguousarray(measured[:, 2:].T)
    step_size = settings.step_size(float(weight_sum), float(update_sum), float(scales.max(initial=0)))
    scales[scales < SMALLEST_SCALE] = 0
    step = np.float32(step_size)
    in_spans(move_span, num_blocks, settings.block_size, *arrays, averages, tables(), scales, constants, step)


@cache
def tables() -> tuple[np.ndarray, ...]:
    """Maps of means and squares, float32 [256]; nearest codes of both by a bfloat16's bits, uint8 [65536]."""
    nearest = [np.roll(nearest_code(signed).numpy(), -(2**15)) for signed in (True, False)]
    return (dynamic_map(True).numpy(), dynamic_map(False).numpy(), *nearest)


def in_spans(kernel: Any, num_blocks: int, block_size: int, *arguments: Any) -> None:
    """Run `kernel(first, last, block_size, *arguments)` over all blocks, one span per thread."""
    threads = max(1, min(torch.get_num_threads(), num_blocks * block_size // SMALLEST_SPAN))
    bounds = [num_blocks * thread // threads for thread in range(threads + 1)]
    spans = list(pairwise(bounds))
    others = [pool().submit(kernel, first, last, block_size, *arguments) for first, last in spans[1:]]
    kernel(*spans[0], block_size, *arguments)
    for other in others:
        other.result()


@cache
def pool() -> ThreadPoolExecutor:
    """The threads besides the calling one."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="lamb")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # the threads are not forked; their pool would wait for ever
