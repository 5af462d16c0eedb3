"""Guidance, top-k, top-p and temperature: which codes may be drawn, and with what probability.

R pictures, C codebook, K logits kept in descending order.
"""

import math

import torch
from torch import Tensor

LEAST_PLAUSIBLE = 0.1  # share of the likeliest code's probability


def guide(conditional: Tensor, null: Tensor, guidance: float | Tensor) -> Tensor:
    """Logits [R, C] moved away from those of the empty caption (classifier-free guidance, Ho and Salimans 2022).

    Codes that are less than LEAST_PLAUSIBLE times as likely after the caption as the likeliest become -inf (the
    plausibility constraint of contrastive decoding, Li et al. 2022, arXiv 2210.15097): otherwise a code that
    is unlikely with the caption but even less likely without it, such as the start of a second thing, may be drawn.
    """
    logits = null + (conditional - null) * guidance
    least = conditional.amax(dim=1, keepdim=True) + math.log(LEAST_PLAUSIBLE)
    return logits.masked_fill_(conditional < least, -torch.inf)


def filter_logits(
    logits: Tensor, top_k: int | Tensor = 0, top_p: float | Tensor = 1.0, largest_k: int | None = None
) -> Tensor:
    """Set the logits [R, C] of codes that may not be drawn to -inf; each setting is one number or a tensor [R].

    First top_k keeps every value >= the k-th largest (0 is off). Then top_p keeps the fewest most likely of these whose
    renormalised probabilities sum to more than p, so the code that crosses p stays (1 is off). Both keep ties. The
    order is that of the paper's inference (Borzunov et al. 2022, arXiv 2207.03481); temperature comes after.

    Args:
        largest_k: the largest of top_k if known, 0 if any is off; it saves sorting the rest.
    """
    pictures, codes = logits.shape
    top_k = torch.as_tensor(top_k, device=logits.device).expand(pictures)[:, None]
    top_p = torch.as_tensor(top_p, device=logits.device).expand(pictures)[:, None]
    top_k = torch.where(top_k > 0, top_k, codes).clamp(max=codes)
    largest = logits.topk(min(largest_k or codes, codes)).values  # [R, K]
    kth = largest.gather(1, top_k - 1)
    num_kept = (logits >= kth).sum(dim=1, keepdim=True, dtype=torch.int32)
    # In float64, so that rounding does not depend on how many values are summed.
    weight = (largest.double() - largest[:, :1]).exp_()
    mass = weight.cumsum(dim=1)
    total = mass.gather(1, top_k - 1) + (num_kept - top_k) * weight.gather(1, top_k - 1)
    crossing = (mass <= top_p * total).sum(dim=1, keepdim=True)
    threshold = largest.gather(1, crossing.clamp(max=largest.shape[1] - 1)).maximum(kth)
    return logits.masked_fill(logits < threshold, -torch.inf)


def sample(logits: Tensor, noise: Tensor, temperature: float | Tensor) -> Tensor:
    """Draw a code of each picture, [R], from filtered logits [R, C] as argmax(logits / temperature + Gumbel noise).

    That is a draw from softmax(logits / temperature); temperature 0 takes the most likely code. The temperature is one
    number or a tensor [R].
    """
    temperature = torch.as_tensor(temperature, device=logits.device, dtype=logits.dtype).expand(len(logits))
    is_greedy = (temperature == 0)[:, None]
    divisor = temperature[:, None].masked_fill(is_greedy, 1)
    scores = logits / divisor + noise * ~is_greedy
    return scores.max(dim=-1).indices  # several times as fast as argmax on a CPU
