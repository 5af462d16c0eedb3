"""Top-k, top-p and temperature: which codes may be drawn, and how freely.

B batch, C codebook.
"""

import math

import torch
from torch import Tensor


def check_sampling(top_k: int, top_p: float, temperature: float) -> None:
    """Raise ValueError when a setting is outside its range: top_k >= 0, 0 <= top_p <= 1, temperature >= 0."""
    if top_k < 0:
        raise ValueError(f"top_k={top_k}: it must be 0 (off) or the number of codes to keep")
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p={top_p}: it must lie in 0..1 (1 is off)")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}: it must be 0 (greedy) or a positive number")


def check_guidance(guidance: float) -> None:
    """Raise ValueError unless the guidance scale is finite and at least 0."""
    if not (guidance >= 0 and math.isfinite(guidance)):
        raise ValueError(f"guidance={guidance}: it must be 1 (off) or another number of at least 0")


def filter_logits(logits_BC: Tensor, top_k: int | Tensor = 0, top_p: float | Tensor = 1.0) -> Tensor:
    """Set the logits of codes that may not be drawn to -inf; each setting is one number or a tensor [B].

    First top_k keeps every value >= the k-th largest, so ties stay (0 is off). Then top_p keeps the shortest prefix, by
    falling probability among what is left, whose mass exceeds p, so the code that crosses p stays (1 is off).
    The order is that of the paper's inference (Borzunov et al. 2022, arXiv 2207.03481); temperature comes after.
    """
    batch, codes = logits_BC.shape
    top_k_B1 = torch.as_tensor(top_k, device=logits_BC.device).expand(batch)[:, None]
    top_p_B1 = torch.as_tensor(top_p, device=logits_BC.device).expand(batch)[:, None]
    descending_BC, order_BC = logits_BC.sort(dim=-1, descending=True, stable=True)
    last_rank_B1 = torch.where(top_k_B1 > 0, top_k_B1, codes).clamp(max=codes) - 1
    is_dropped_BC = descending_BC < descending_BC.gather(-1, last_rank_B1)
    mass_BC = descending_BC.masked_fill(is_dropped_BC, -torch.inf).softmax(dim=-1)
    mass_before_BC = mass_BC.cumsum(dim=-1) - mass_BC
    # Rounding may bring the sum past 1 before the last code, hence the explicit "off".
    is_dropped_BC |= (mass_before_BC > top_p_B1) & (top_p_B1 < 1)
    # The sum less its last term may round to above 0 for the first code.
    is_dropped_BC[:, 0] = False
    return logits_BC.masked_fill(torch.empty_like(is_dropped_BC).scatter_(-1, order_BC, is_dropped_BC), -torch.inf)


def choose(logits_BC: Tensor, noise_BC: Tensor, temperature: float | Tensor) -> Tensor:
    """Draw one code [B] for each row of filtered logits: argmax(logits / temperature + Gumbel noise).

    That is a draw from softmax(logits / temperature); temperature 0 takes the most likely code.
    The temperature is one number or a tensor [B].
    """
    temperature_B = torch.as_tensor(temperature, device=logits_BC.device, dtype=logits_BC.dtype).expand(len(logits_BC))
    is_greedy_B1 = (temperature_B == 0)[:, None]
    divisor_B1 = temperature_B[:, None].masked_fill(is_greedy_B1, 1)
    return (logits_BC / divisor_B1 + noise_BC.masked_fill(is_greedy_B1, 0)).argmax(dim=-1)
