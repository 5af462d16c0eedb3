"""Token shift: part of each position's channels comes from its neighbours."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def token_shift(x: Tensor, num_text: int, side: int) -> Tensor:
    """Shift channels of x [B, S, D] whose first `num_text` positions are text and the rest codes in raster order.

    Text: the lower half of the channels is the previous position's (zeros at position 0).
    Codes: the first quarter is the code's above (zeros in row 0), the second quarter the left neighbour's (zeros in
    column 0). The upper half is always the position's own.
    """
    half, quarter = x.shape[-1] // 2, x.shape[-1] // 4
    text, image = x[:, :num_text], x[:, num_text:]
    previous = shift_down(text[..., :half], 1)
    above = shift_down(image[..., :quarter], side)
    in_first_column = torch.arange(image.shape[1], device=x.device) % side == 0
    left = shift_down(image[..., quarter:half], 1).masked_fill(in_first_column[:, None], 0.0)
    shifted = torch.cat([previous, torch.cat([above, left], dim=-1)], dim=1)
    return torch.cat([shifted, x[..., half:]], dim=-1)


def shift_down(x: Tensor, steps: int) -> Tensor:
    """x [B, S, D] moved `steps` positions later, zeros in front, the same length."""
    return pad(x, (0, 0, steps, 0))[:, : x.shape[1]]
