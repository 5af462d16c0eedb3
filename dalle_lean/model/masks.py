"""Which key each query may see: text then image, row, column, convolution or full.

P = number of text positions (`<bos>` and the caption), f = side of the code grid, S = P + f * f.
Masks are boolean, True = may attend. A text query sees the text up to itself; an image query sees all text, itself and,
of the codes before it, those its kind of attention names. Source: Ramesh et al. 2021, appendix B.1.

This is the rule, pair by pair; `attention.py` computes the same pairs in training without [S, S] weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dalle_lean.model.config import DalleConfig

ImageRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row and column of the query, row and column of the key) -> may attend, where the key is not after the query."""


def row_mask(num_text: int, side: int, device: torch.device | str = "cpu") -> Tensor:
    """Image queries see the codes before them in their row. [S, S]"""
    return _causal_mask(num_text, side, lambda row, column, key_row, key_column: row == key_row, device)


def column_mask(num_text: int, side: int, device: torch.device | str = "cpu") -> Tensor:
    """Image queries see the codes above them in their column. [S, S]"""
    return _causal_mask(num_text, side, lambda row, column, key_row, key_column: column == key_column, device)


def conv_mask(num_text: int, side: int, kernel: int, window: str, device: torch.device | str = "cpu") -> Tensor:
    """Image queries see a kernel x kernel window of the codes up to them. [S, S]

    window "centred": the query is in the middle, and what comes after it in raster order is cut away.
    window "corner": the query is in the bottom right corner.
    """
    reach = (kernel - 1) // 2

    def centred(row: Tensor, column: Tensor, key_row: Tensor, key_column: Tensor) -> Tensor:
        return ((row - key_row).abs() <= reach) & ((column - key_column).abs() <= reach)

    def corner(row: Tensor, column: Tensor, key_row: Tensor, key_column: Tensor) -> Tensor:
        up, left = row - key_row, column - key_column
        return (up >= 0) & (up < kernel) & (left >= 0) & (left < kernel)

    return _causal_mask(num_text, side, centred if window == "centred" else corner, device)


def full_mask(num_text: int, side: int, device: torch.device | str = "cpu") -> Tensor:
    """Every query sees all that is before it. [S, S]"""
    return _causal_mask(num_text, side, lambda row, *_: torch.ones_like(row, dtype=torch.bool), device)


def attention_mask(config: DalleConfig, kind: str, device: torch.device | str = "cpu") -> Tensor:
    """The mask of one kind of attention over `<bos>`, caption and all codes: [T + 1 + I, T + 1 + I]."""
    sizes = (config.num_text_positions, config.image_side)
    if kind == "row":
        return row_mask(*sizes, device)
    if kind == "column":
        return column_mask(*sizes, device)
    if kind == "conv":
        return conv_mask(*sizes, config.conv_kernel, config.conv_window, device)
    return full_mask(*sizes, device)


def _causal_mask(num_text: int, side: int, rule: ImageRule, device: torch.device | str) -> Tensor:
    position = torch.arange(num_text + side * side, device=device)
    code = position - num_text
    row, column = code.div(side, rounding_mode="floor"), code.remainder(side)
    is_text_key = position[None, :] < num_text
    is_image_pair = (position[:, None] >= num_text) & ~is_text_key
    in_window = rule(row[:, None], column[:, None], row[None, :], column[None, :])
    causal = position[None, :] <= position[:, None]
    return causal & (is_text_key | (is_image_pair & in_window))
