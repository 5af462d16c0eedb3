"""Autocast by name."""

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Autocast for "bf16" and "fp16"; disabled for "fp32" and "bf16-weights"."""
    return torch.autocast(device_type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)
