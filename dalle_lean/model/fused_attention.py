"""Row, column and convolution attention by FlexAttention: a kernel that skips blocks of scores in which no pair attends
and keeps no scores for backward.

Source: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels".

B batch, H heads, S positions, d head size, P text positions, f side of the grid.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dalle_lean.model.config import ALONG_COLUMNS, DalleConfig
from dalle_lean.model.masks import code_sees_code, text_mask


class Pattern(NamedTuple):
    """Which pairs of positions attend."""

    blocks: Any  # the BlockMask of the ordered positions
    order: Tensor | None  # positions such that neighbours share most of their keys, [S]; None is as they are
    places: Tensor | None  # the place of each position in `order`, [S]


def attend_fused(
    query: Tensor, key: Tensor, value: Tensor, kind: str, config: DalleConfig, num_text: int, side: int
) -> Tensor:
    """Query, key, value and the result are [B, H, S, d], positions as in `pattern_of`. Backward needs a GPU."""
    pattern = pattern_of(config, kind, num_text, side, query.shape[2], query.device)
    if pattern.order is not None:
        query, key, value = (x.index_select(2, pattern.order) for x in (query, key, value))
    out = kernel()(query, key, value, block_mask=pattern.blocks)
    return out if pattern.places is None else out.index_select(2, pattern.places)


@cache
def kernel() -> Any:
    """FlexAttention, compiled for each shape and dtype at its first use.

    For up to 256 of them, then an error: beyond torch's limit of 8 it would run uncompiled and hold all scores.
    `length_warmup`, held-out batches and last chunks bring a few shapes each.
    """
    from torch.nn.attention.flex_attention import flex_attention  # imports the compiler

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # the cached pattern must also work in training
def pattern_of(config: DalleConfig, kind: str, num_text: int, side: int, length: int, device: torch.device) -> Pattern:
    """The pattern of the first `length` positions: `num_text` of text, then codes of a grid of `side` columns."""
    from torch.nn.attention.flex_attention import create_block_mask

    codes = torch.arange(length - num_text, device=device)
    order = None
    if kind in ALONG_COLUMNS:
        codes = codes[torch.argsort(codes % side, stable=True)]
        order = torch.cat([torch.arange(num_text, device=device), num_text + codes])
    mask = torch.zeros(length, length, dtype=torch.bool, device=device)
    mask[:num_text, :num_text] = text_mask(num_text, device)
    mask[num_text:, :num_text] = True
    mask[num_text:, num_text:] = code_sees_code(config, kind, side, codes[:, None], codes[None, :])
    blocks = create_block_mask(lambda _b, _h, query, key: mask[query, key], None, None, length, length, str(device))
    return Pattern(blocks, order, None if order is None else order.argsort())
