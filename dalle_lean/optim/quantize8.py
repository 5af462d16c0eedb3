"""Blockwise 8-bit quantization of optimizer statistics.

A tensor is cut into blocks of neighbours in raster order. Each block keeps its largest magnitude as a float32 scale,
each element one byte: the index of the nearest value in a fixed map over [-1, 1], or over [0, 1] if never negative.
Source: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

DECADES = 7
CPU = torch.device("cpu")
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""A block whose largest magnitude is below this becomes zeros: subnormals have no inverse and slow a CPU down."""


@cache
def dynamic_map(signed: bool, device: torch.device = CPU) -> Tensor:
    """The values of the 256 codes, ascending, float32 [256]: zero, one, and seven decades below one.

    A decade has half as many values as the one above it, evenly spaced: the relative error is under 1 % near the
    block's largest element, while elements 10 million times smaller still differ from zero.
    """
    values = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(DECADES):
        count = 2 ** (DECADES - signed - decade)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64) * 10.0**-decade
        centres = (edges[:-1] + edges[1:]) / 2
        values += [centres, -centres] if signed else [centres]
    return torch.cat(values).sort().values.float().to(device)


def zero_code(signed: bool) -> int:
    """The code of exactly zero."""
    return 127 if signed else 0


@cache
def nearest_code(signed: bool, device: torch.device = CPU) -> Tensor:
    """The code of every bfloat16 number: uint8 [65536], indexed by its bits read as int16, plus 32768.

    Looking a number up by its upper 16 bits is several times faster than a search, and as good: bfloat16 rounds by
    at most 0.4 %, the map's finest step is 0.7 %. Unsigned, only zero becomes zero: a second moment rounded to zero
    beside a first moment that is not would make the step explode.
    """
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).float()
    values = dynamic_map(signed)
    codes = torch.bucketize(numbers, (values[1:] + values[:-1]) / 2)
    if not signed:
        codes[numbers > 0] = codes[numbers > 0].clamp(min=1)
    return codes.to(torch.uint8).to(device)


def quantize(x: Tensor, *, signed: bool, block_size: int) -> tuple[Tensor, Tensor]:
    """Finite floats of any shape, layout and device -> (codes uint8, of x's shape; scales float32, one per block).

    The last block may be shorter. Zeros stay exactly zero. Unsigned needs x >= 0.
    """
    flat = x.reshape(-1).float()
    blocks = functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    scales = blocks.abs().amax(dim=1)
    scales = torch.where(scales < SMALLEST_SCALE, 0, scales)
    inverses = torch.where(scales > 0, 1 / scales, 0)
    bits = (blocks * inverses[:, None]).bfloat16().view(torch.int16)
    codes = nearest_code(signed, x.device).index_select(0, bits.view(-1).int() + 2**15)
    return codes[: flat.numel()].view(x.shape), scales


def dequantize(codes: Tensor, scales: Tensor, *, signed: bool, block_size: int) -> Tensor:
    """Inverse of `quantize`: float32 of the codes' shape."""
    flat = functional.pad(codes.view(-1), (0, -codes.numel() % block_size))
    values = functional.embedding(flat.int(), dynamic_map(signed, codes.device)[:, None]).view(-1, block_size)
    return (values * scales[:, None]).view(-1)[: codes.numel()].view(codes.shape)
