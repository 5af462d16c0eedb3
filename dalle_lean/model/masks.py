"""Attention masks: which keys each query attends to.

P text positions (`<bos>` and the caption), f side of the code grid, S = P + f * f. Masks are boolean, True = may
attend. A text query sees the text up to itself; an image query sees all text, itself and, of the codes before it, those
that its kind of attention names. Source: Ramesh et al. 2021, "Zero-Shot Text-to-Image Generation", appendix B.1.

`code_sees_code` is the only place with these rules: training (`attention.py`, `fused_attention.py`) and sampling call
it for the pairs that they compute.
"""

import torch
from torch import Tensor

from dalle_lean.model.config import DalleConfig


def code_sees_code(config: DalleConfig, kind: str, side: int, query: Tensor, key: Tensor) -> Tensor:
    """Whether the code at place `query` attends to the code at place `key`.

    Args:
        side: of the grid, whose places count in raster order from 0; a crop's may be smaller than the config's.
        query, key: integer tensors that broadcast. No query attends to a key outside 0..side * side - 1.

    Returns:
        Booleans of the broadcast shape.
    """
    causal = (key >= 0) & (key <= query)
    up = query // side - key // side
    left = query % side - key % side
    if kind == "row":
        return causal & (up == 0)
    if kind == "column":
        return causal & (left == 0)
    if kind == "conv":
        back, right = config.conv_reach
        return causal & (up <= back) & (left <= back) & (left >= -right)
    return causal


def text_mask(num_text: int, device: torch.device | str = "cpu") -> Tensor:
    """Which text positions each text position attends to, [P, P]."""
    return torch.ones(num_text, num_text, dtype=torch.bool, device=device).tril()
