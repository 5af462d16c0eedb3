"""How much of its codebook a VQGAN uses."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CodebookUse:
    """How many codes are used, and how evenly."""

    share: float
    """Share of the codebook that occurs, 0..1."""
    perplexity: float
    """exp of the entropy in nats: the number of equally frequent codes with the same entropy, 1..K."""


def codebook_use(codes: Tensor, size: int) -> CodebookUse:
    """Measure codes of any shape from a codebook of `size` codes."""
    shares = torch.bincount(codes.flatten(), minlength=size).double() / codes.numel()
    used = shares[shares > 0]
    return CodebookUse(share=len(used) / size, perplexity=float((-used * used.log()).sum().exp()))
