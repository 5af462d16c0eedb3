"""Autocast by name, and which processors multiply in bfloat16."""

import logging
from functools import cache

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger(__name__)


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Autocast for "bf16" and "fp16"; disabled for "fp32" and "bf16-weights", and for "bf16" where it is not usable."""
    enabled = precision in AUTOCAST and (precision != "bf16" or can_use_bf16(device_type))
    return torch.autocast(device_type, AUTOCAST.get(precision), enabled=enabled)


def can_use_bf16(device_type: str) -> bool:
    """False for a CPU on which bfloat16 products would take many times as long as float32 ones; logged once."""
    return device_type != "cpu" or _cpu_can_use_bf16()


@cache
def _cpu_can_use_bf16() -> bool:
    if onednn_multiplies_bf16():
        return True
    logger.warning("This CPU has no instructions for bfloat16; what asks for bf16 is computed in float32.")
    return False


def onednn_multiplies_bf16() -> bool:
    """Whether oneDNN has kernels for bfloat16 products on this CPU: not with AVX2 alone."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
