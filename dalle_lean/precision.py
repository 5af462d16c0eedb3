"""Autocast by name, and which processors multiply in bfloat16."""

import logging
from functools import cache

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

logger = logging.getLogger(__name__)


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Autocast for "bf16" and "fp16", if `effective_precision` leaves them; disabled for "fp32" and "bf16-weights"."""
    dtype = AUTOCAST.get(effective_precision(device_type, precision))
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


def effective_precision(device_type: str, precision: str) -> str:
    """The precision, but "fp32" for "bf16" on a CPU where that would take many times as long; logged once."""
    return "fp32" if precision == "bf16" and device_type == "cpu" and not _cpu_can_use_bf16() else precision


@cache
def _cpu_can_use_bf16() -> bool:
    if onednn_multiplies_bf16():
        return True
    logger.warning("This CPU has no fast bfloat16; what asks for bf16 is computed in fp32.")
    return False


def onednn_multiplies_bf16() -> bool:
    """Whether oneDNN has kernels for bfloat16 products on this CPU: not with AVX2 alone."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
