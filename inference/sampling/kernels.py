"""All that numba compiles for drawing on the CPU: a step's kernels, products and the draw of its codes."""

import os
from typing import Any

import numpy as np
from numba import config, set_num_threads, threading_layer

from inference.sampling import draw_kernel, matmul_kernel, step_kernel

if "NUMBA_THREADING_LAYER" not in os.environ:
    config.THREADING_LAYER = "threadsafe"  # type: ignore[attr-defined]


def prepare(dtype: Any) -> None:
    """Start numba's threads and compile what a step with numbers of this dtype needs, or load it from the disk.

    int8: what float32 needs, and products of int8. ValueError if numba's threads cannot serve several of this program's
    threads at once.
    """
    use_threads(1)
    if dtype == np.int8:
        if matmul_kernel.MULTIPLIES_INT8:
            panels, empty = np.zeros((0, 1, 1), np.int32), np.zeros(0, np.float32)
            starts = np.zeros(0, np.int32)
            matmul_kernel.multiply_int8(np.zeros((0, 4), np.float32), panels, starts, empty, empty, empty[:, None])
        dtype = np.dtype(np.float32)
    number, row, column = (np.zeros(shape, dtype) for shape in (1, (1, 2), (2, 1)))
    stream, pair, inputs = (np.zeros(shape, np.float32) for shape in ((1, 2), 2, (1, 1, 1, 2)))
    step_kernel.geglu(row, np.zeros((1, 1), dtype))
    for delta in (row, stream):  # the latter if the output is normalised
        step_kernel.add_and_prepare(stream, delta, pair, pair, pair, np.float32(1), inputs, 0, 0, row)
    words, code, setting = np.zeros((2, 1), np.uint64), np.zeros(1, np.int64), np.zeros(1, np.float32)
    draw_kernel.draw(stream, np.float32(-1), setting, code, setting, setting, words, words, 0, code)
    rotation = np.zeros((3, 2), np.float32)
    step_kernel.attend(np.zeros((1, 6), dtype), rotation, row, row, number, 0, 0, column, row, 1, 1, row)
    if dtype == np.float32 or matmul_kernel.MULTIPLIES_BF16:
        units = np.zeros((0, 1), np.float32 if dtype == np.float32 else np.int32)
        matmul_kernel.multiply(units, units[None], setting, row)
    if threading_layer() == "workqueue":
        raise ValueError("it found neither OpenMP nor TBB")


def use_threads(count: int) -> None:
    """Run the kernels on this many threads, if there are as many."""
    set_num_threads(min(count, config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
