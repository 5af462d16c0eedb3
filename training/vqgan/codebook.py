"""Codebook learning: quantizers with a gradient and a loss.

Shapes: N pictures, h x w codes, M = N * h * w vectors, K codebook size, C code width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dalle_lean.images.vqgan import GumbelQuantizer, NearestQuantizer

LAST_TEMPERATURE = 1 / 16
"""Of Gumbel-softmax at the end of the run; it falls geometrically from 1."""
DIVERGENCE_WEIGHT = 5e-4
"""Of the divergence in the loss."""
RESTART_SHARE = 0.05
"""Codes used less than this share of their use in a uniform distribution restart."""


class NearestLearner(nn.Module):
    """Plain VQ: each code is the exponential moving average of the vectors assigned to it (van den Oord et al. 2017,
    arXiv 1711.00937, appendix A.1), and unused codes restart where the quantization error is large.

    Args:
        quantizer: its table is changed in place, without a gradient.
        decay: of the moving averages, per step.
        commitment: weight of the commitment loss, which keeps the encoder's output near the codes.
    """

    counts: Tensor
    sums: Tensor

    def __init__(self, quantizer: NearestQuantizer, *, decay: float = 0.99, commitment: float = 0.25):
        super().__init__()
        # A tuple does not register the quantizer as a submodule: the VQGAN alone saves its weights.
        self.quantizers = (quantizer,)
        self.decay, self.commitment = decay, commitment
        quantizer.table.requires_grad_(False)
        self.register_buffer("counts", torch.zeros(len(quantizer.table)))  # vectors per step, moving average
        self.register_buffer("sums", torch.zeros_like(quantizer.table))

    def forward(self, z: Tensor, progress: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """z [N, C, h, w] float32 -> (code vectors with a straight-through gradient [N, C, h, w], loss).

        `progress` is the completed share of the run, 0..1. Updates the codes from z.
        """
        quantizer = self.quantizers[0]
        vectors = z.detach().permute(0, 2, 3, 1).flatten(end_dim=2)  # [M, C]
        if not self.counts.any():  # the first batch: random vectors of it become the codes
            rows = torch.randint(len(vectors), (len(self.counts),), generator=generator).to(vectors.device)
            self.place(torch.arange(len(self.counts), device=vectors.device), vectors[rows], len(vectors))
        with torch.no_grad():
            codes = quantizer.scores(z).argmax(dim=1)  # [N, h, w]
            quantized = F.embedding(codes, quantizer.table).permute(0, 3, 1, 2)
            distances = (z - quantized).square().mean(dim=1).flatten()  # [M]
            self.update(vectors, codes.flatten(), distances, restart=progress < 0.8, generator=generator)
        commitment_loss = self.commitment * F.mse_loss(z, quantized)
        return z + (quantized - z).detach(), commitment_loss

    def update(
        self, vectors: Tensor, codes: Tensor, distances: Tensor, *, restart: bool, generator: torch.Generator
    ) -> None:
        """Update the moving averages with `vectors` [M, C], their `codes` [M] and their squared `distances` [M] from
        them; `restart` moves unused codes."""
        size = len(self.counts)
        counts = torch.bincount(codes, minlength=size).float()
        sums = torch.zeros_like(self.sums).index_add_(0, codes, vectors)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        table = self.quantizers[0].table
        table.copy_(torch.where(self.counts[:, None] > 1e-5, self.sums / self.counts.clamp(min=1e-5)[:, None], table))
        unused = (self.counts < RESTART_SHARE * len(vectors) / size).nonzero().flatten()
        if restart and len(unused) and distances.sum() > 0:
            # By distance, as in k-means++: uniform draws would mostly hit plain backgrounds, which have codes already.
            rows = torch.multinomial(distances.cpu(), len(unused), replacement=True, generator=generator)
            self.place(unused, vectors[rows.to(vectors.device)], len(vectors))

    @torch.no_grad()
    def place(self, codes: Tensor, vectors: Tensor, vectors_per_step: int) -> None:
        """Set `codes` [R] to `vectors` [R, C], with the counts of a uniform use."""
        uniform_count = vectors_per_step / len(self.counts)
        self.counts[codes] = uniform_count
        self.sums[codes] = vectors * uniform_count
        self.quantizers[0].table[codes] = vectors


class GumbelLearner(nn.Module):
    """Straight-through Gumbel-softmax (Jang et al. 2016, arXiv 1611.01144) with a falling temperature; its loss, the
    Kullback-Leibler divergence from a uniform distribution, keeps the codebook from collapsing.

    The quantizer learns by gradient.
    """

    def __init__(self, quantizer: GumbelQuantizer):
        super().__init__()
        self.quantizers = (quantizer,)

    def forward(self, z: Tensor, progress: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """z [N, C, h, w] float32 -> (code vectors with a straight-through gradient [N, C, h, w], loss).

        `progress` is the completed share of the run, 0..1.
        """
        scores = self.quantizers[0].scores(z)  # [N, K, h, w]
        temperature = LAST_TEMPERATURE**progress
        noise = -torch.empty(scores.shape).exponential_(generator=generator).log().to(scores.device)
        soft = ((scores + noise) / temperature).softmax(dim=1)
        hard = torch.zeros_like(soft).scatter_(1, soft.argmax(dim=1, keepdim=True), 1.0)
        chosen = hard + soft - soft.detach()
        log_shares = scores.log_softmax(dim=1)
        divergence = (log_shares.exp() * (log_shares + math.log(scores.shape[1]))).sum(dim=1).mean()
        return torch.einsum("nkhw,kc->nchw", chosen, self.quantizers[0].table), DIVERGENCE_WEIGHT * divergence
