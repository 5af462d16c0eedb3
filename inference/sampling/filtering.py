"""Guidance, top-k, top-p and temperature: which codes may be drawn, and with what probability.

B batch, C codebook.
"""

import math

import torch
from torch import Tensor

LEAST_PLAUSIBLE = 0.1  # share of the likeliest code's probability


def guide(conditional_BC: Tensor, null_BC: Tensor, guidance: float | Tensor) -> Tensor:
    """Logits moved away from those of the empty caption (classifier-free guidance, Ho and Salimans 2022).

    Codes that are less than LEAST_PLAUSIBLE times as likely after the caption as the likeliest become -inf (the
    plausibility constraint of contrastive decoding, Li et al. 2022, arXiv 2210.15097): otherwise a code that is
    unlikely with the caption and still less likely without it, such as the first of a second thing, may win.
    """
    logits_BC = null_BC + (conditional_BC - null_BC) * guidance
    least_B1 = conditional_BC.amax(dim=1, keepdim=True) + math.log(LEAST_PLAUSIBLE)
    return logits_BC.masked_fill_(conditional_BC < least_B1, -torch.inf)


def filter_logits(
    logits_BC: Tensor, top_k: int | Tensor = 0, top_p: float | Tensor = 1.0, largest_k: int | None = None
) -> Tensor:
    """Set the logits of codes that may not be drawn to -inf; each setting is one number or a tensor [B].

    First top_k keeps every value >= the k-th largest (0 is off). Then top_p keeps the fewest most likely of these whose
    renormalised probabilities sum to more than p, so the code that crosses p stays (1 is off). Both keep ties. The
    order is that of the paper's inference (Borzunov et al. 2022, arXiv 2207.03481); temperature comes after.

    Args:
        largest_k: the largest of top_k if known, 0 if any is off; it saves sorting the rest.
    """
    batch, codes = logits_BC.shape
    top_k_B1 = torch.as_tensor(top_k, device=logits_BC.device).expand(batch)[:, None]
    top_p_B1 = torch.as_tensor(top_p, device=logits_BC.device).expand(batch)[:, None]
    top_k_B1 = torch.where(top_k_B1 > 0, top_k_B1, codes).clamp(max=codes)
    largest_BK = logits_BC.topk(min(largest_k or codes, codes)).values
    kth_B1 = largest_BK.gather(1, top_k_B1 - 1)
    num_kept_B1 = (logits_BC >= kth_B1).sum(dim=1, keepdim=True, dtype=torch.int32)
    # In float64, so that rounding does not depend on how many values are summed.
    weight_BK = (largest_BK.double() - largest_BK[:, :1]).exp_()
    mass_BK = weight_BK.cumsum(dim=1)
    total_B1 = mass_BK.gather(1, top_k_B1 - 1) + (num_kept_B1 - top_k_B1) * weight_BK.gather(1, top_k_B1 - 1)
    crossing_B1 = (mass_BK <= top_p_B1 * total_B1).sum(dim=1, keepdim=True)
    threshold_B1 = largest_BK.gather(1, crossing_B1.clamp(max=largest_BK.shape[1] - 1)).maximum(kth_B1)
    return logits_BC.masked_fill(logits_BC < threshold_B1, -torch.inf)


def sample(logits_BC: Tensor, noise_BC: Tensor, temperature: float | Tensor) -> Tensor:
    """Draw one code per row of filtered logits, [B], as argmax(logits / temperature + Gumbel noise).

    That is a draw from softmax(logits / temperature); temperature 0 takes the most likely code. The temperature is one
    number or a tensor [B].
    """
    temperature_B = torch.as_tensor(temperature, device=logits_BC.device, dtype=logits_BC.dtype).expand(len(logits_BC))
    is_greedy_B1 = (temperature_B == 0)[:, None]
    divisor_B1 = temperature_B[:, None].masked_fill(is_greedy_B1, 1)
    scores_BC = logits_BC / divisor_B1 + noise_BC * ~is_greedy_B1
    return scores_BC.max(dim=-1).indices  # several times as fast as argmax on a CPU
