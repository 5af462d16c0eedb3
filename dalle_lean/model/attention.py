"""Causal attention in which an image query attends only to the text and the codes in its window.

The grid of codes is cut into lines, and each line of queries shares one window of keys: its row, its column, or the
rows that a convolution reaches. Text queries attend to the text. Only these scores are computed; within them,
`masks.py` says which pairs attend.

B batch, H heads, S positions, d head size, P text positions, f side of the grid, w keys in a window.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dalle_lean.model.config import ALONG_COLUMNS, DalleConfig
from dalle_lean.model.fused_attention import attend_fused
from dalle_lean.model.masks import code_sees_code, text_mask


class Layout:
    """The meaning of the positions: `num_text` of text (with `<bos>`), then codes of a grid of `side` columns.

    Holds what the config's layers share: the masks, True = may attend, and the rotary table (see `rope.rotate`).
    `fused`: the sparse kinds are computed by `fused_attention`.
    """

    def __init__(
        self,
        config: DalleConfig,
        num_text: int,
        side: int,
        device: torch.device | str = "cpu",
        table: Tensor | None = None,
        fused: bool = False,
    ):
        self.config, self.num_text, self.side, self.table, self.fused = config, num_text, side, table, fused
        self.text_mask = text_mask(num_text, device)
        kinds = set(config.layer_kinds) - {"full"}
        self.window_masks = {kind: window_mask(config, kind, side, torch.device(device)) for kind in kinds}


def attend(query: Tensor, key: Tensor, value: Tensor, kind: str, layout: Layout) -> Tensor:
    """Attention of one kind; query, key, value and the result are [B, H, S, d] from position 0, S at most P + f * f.

    The softmax is computed in float32 or wider. Memory is linear in S: full attention never holds its scores.
    """
    if kind == "full":
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    if layout.fused:
        # Its mask would not survive being traced as a part of a larger graph.
        fused = torch.compiler.disable(attend_fused) if torch.compiler.is_compiling() else attend_fused
        return fused(query, key, value, kind, layout.config, layout.num_text, layout.side)
    query = query * query.shape[-1] ** -0.5
    num_text = layout.num_text
    text_query, *text = [x[:, :, :num_text] for x in (query, key, value)]
    image_query, *codes = [x[:, :, num_text:] for x in (query, key, value)]
    out = attend_text(text_query, text, layout)
    if image_query.shape[2] == 0:
        return out
    return torch.cat([out, attend_image(image_query, text, codes, kind, layout)], dim=2)


def attend_text(query: Tensor, text: Sequence[Tensor], layout: Layout) -> Tensor:
    """Causal attention of the text over the text; scaled query, keys and values [B, H, P, d] -> [B, H, P, d]."""
    key, value = text
    length = query.shape[2]
    mask = layout.text_mask[:length, :length]
    return softmax(torch.where(mask, query @ key.transpose(-1, -2), -torch.inf)) @ value


def attend_image(query: Tensor, text: Sequence[Tensor], codes: Sequence[Tensor], kind: str, layout: Layout) -> Tensor:
    """Attention of the codes: one softmax over the text and the window of codes.

    query [B, H, n, d], scaled; text: keys and values [B, H, P, d]; codes: keys and values [B, H, n, d], n <= f * f.
    Returns [B, H, n, d].
    """
    num_codes, num_text, side = query.shape[2], text[0].shape[2], layout.side
    lines = to_lines(query, kind, side)  # [B, H, f, f, d]
    keys, values = (to_windows(to_lines(x, kind, side), kind, layout.config) for x in codes)  # [B, H, f, w, d]
    to_text = lines.flatten(2, 3) @ text[0].transpose(-1, -2)
    to_codes = torch.where(layout.window_masks[kind], lines @ keys.transpose(-1, -2), -torch.inf)
    weights = softmax(torch.cat([to_text.unflatten(2, (side, side)), to_codes], dim=-1))
    on_text, on_codes = weights[..., :num_text], weights[..., num_text:]
    out = (on_text.flatten(2, 3) @ text[1]).unflatten(2, (side, side)) + on_codes @ values
    if kind in ALONG_COLUMNS:
        out = out.transpose(2, 3)
    return out.flatten(2, 3)[:, :, :num_codes]


def softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, computed in float32 or wider, returned in the scores' dtype."""
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def to_lines(x: Tensor, kind: str, side: int) -> Tensor:
    """Codes [B, H, n, d] -> [B, H, f, f, d]: rows, or columns for ALONG_COLUMNS; missing codes are zeros."""
    missing = side * side - x.shape[2]
    grid = (pad(x, (0, 0, 0, missing)) if missing else x).unflatten(2, (side, side))
    return grid.transpose(2, 3) if kind in ALONG_COLUMNS else grid


def to_windows(lines: Tensor, kind: str, config: DalleConfig) -> Tensor:
    """The window of each line of queries: the line itself, for a convolution with the rows above it that it reaches.

    lines [B, H, f, f, d] -> [B, H, f, w, d]; rows outside the picture are zeros.
    """
    if kind != "conv":
        return lines
    side = lines.shape[2]
    back, _ = config.conv_reach
    padded = pad(lines, (0, 0, 0, 0, back, 0))
    return torch.cat([padded[:, :, first : first + side] for first in range(back + 1)], dim=3)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # the cached mask must also work in training
def window_mask(config: DalleConfig, kind: str, side: int, device: torch.device) -> Tensor:
    """Which keys of its line's window each query attends to, [f, f, w]."""
    numbers = torch.arange(1, side * side + 1, device=device)  # codes from 1, as 0 pads the windows
    lines = to_lines(numbers[None, None, :, None], kind, side)
    keys = to_windows(lines, kind, config).transpose(3, 4)  # [1, 1, f, 1, w]
    return code_sees_code(config, kind, side, lines - 1, keys - 1)[0, 0]
