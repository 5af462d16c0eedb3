"""How much of its codebook a VQGAN uses."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CodebookUse:
    """How evenly codes are used."""

    share: float
    """Of the codes, that occur at all; 0..1."""
    perplexity: float
    """exp of the entropy (nats): how many codes it would be if all were used alike; 1..K."""


def codebook_use(codes: Tensor, size: int) -> CodebookUse:
    """Measure codes of any shape."""
    shares = torch.bincount(codes.flatten(), minlength=size).double() / codes.numel()
    used = shares[shares > 0]
    return CodebookUse(share=len(used) / size, perplexity=float((-used * used.log()).sum().exp()))
