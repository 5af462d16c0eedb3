"""What a machine does at most: the rate of its matrix products, the rate at which it reads memory."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from inference.sampling.packed_linear import Precision, compute_dtype, pack

MATMUL_SIZES = (1280, 1024, 8192)
"""Rows, inner width and columns of the product that is timed."""
BANDWIDTH_BYTES = 2**29
"""Read at once; beyond any processor's cache."""


def now(device: torch.device | str = "cpu") -> float:
    """Seconds of a clock, read when the device has done all that it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(run: Callable[[], Any], repeats: int, device: torch.device | str = "cpu") -> float:
    """Of one run among `repeats` that follow each other without a pause."""
    started = now(device)
    for _ in range(repeats):
        run()
    return (now(device) - started) / repeats


@torch.inference_mode()
def matmul_rate(precision: Precision = "fp32", device: torch.device | str = "cpu", repeats: int = 8) -> float:
    """Operations per second of one large product in a precision, as sampling computes it; the median of some."""
    rows, inner, columns = MATMUL_SIZES
    product = pack(nn.Linear(inner, columns, bias=False, device=device), precision)
    x = torch.randn(rows, inner, device=device).to(compute_dtype(precision))
    product(x)
    return 2 * rows * inner * columns / median(seconds_of(lambda: product(x), 1, device) for _ in range(repeats))


@torch.inference_mode()
def bandwidth(device: torch.device | str = "cpu", repeats: int = 8) -> float:
    """Bytes per second of reading memory (the sum of a large tensor), the median of some."""
    x = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    x.sum()
    return BANDWIDTH_BYTES / median(seconds_of(x.sum, 1, device) for _ in range(repeats))
