"""The precision that a step computes in."""

from contextlib import ExitStack

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

LONGEST_FOR_MATH = 512
"""Positions up to which explicit attention weights are no burden."""


def autocast(device_type: str, precision: str, positions: int) -> ExitStack:
    """bfloat16 autocast where `precision` is "bf16", over sequences of `positions`; nothing changes for "fp32"."""
    stack = ExitStack()
    stack.enter_context(torch.autocast(device_type, torch.bfloat16, enabled=precision == "bf16"))
    if device_type == "cpu" and positions <= LONGEST_FOR_MATH:
        # The fused CPU kernel's backward takes several times as long on short sequences.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    return stack
