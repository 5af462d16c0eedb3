"""A machine's limits: the rate of its matrix products, and the rate at which it reads memory."""

from statistics import median

import torch
from torch import nn

from benchmarks.timing import seconds_of
from inference.sampling.packed_linear import Precision, compute_dtype, pack

MATMUL_SIZES = (1280, 1024, 8192)
"""Rows, inner width and columns of the timed product."""
BANDWIDTH_BYTES = 2**29
"""Read at once; larger than any processor's cache."""
REPEATS = 8


@torch.inference_mode()
def matmul_rate(
    precision: Precision | None, device: torch.device | str = "cpu", sizes: tuple[int, int, int] = MATMUL_SIZES
) -> float:
    """Median operations per second of one large product, as sampling computes it; None: as training does, in fp32."""
    rows, inner, columns = sizes
    layer = nn.Linear(inner, columns, bias=False, device=device)
    product = layer if precision is None else pack(layer, precision)
    x = torch.randn(rows, inner, device=device).to(compute_dtype(precision or "fp32"))
    product(x)
    return 2 * rows * inner * columns / median(seconds_of(lambda: product(x), 1, device) for _ in range(REPEATS))


@torch.inference_mode()
def bandwidth(device: torch.device | str = "cpu") -> float:
    """Median bytes per second of reading memory (the sum of a large tensor)."""
    x = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    x.sum()
    return BANDWIDTH_BYTES / median(seconds_of(x.sum, 1, device) for _ in range(REPEATS))
