"""The precision that a step computes in."""

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Autocast where `precision` is a type to cast to; nothing changes for the others ("fp32", "bf16-weights")."""
    return torch.autocast(device_type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)
