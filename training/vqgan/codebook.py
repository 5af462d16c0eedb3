"""Codebook learning: a quantizer in training gives code vectors with a gradient, and a loss.

Shapes: N pictures, h x w codes, M = N * h * w vectors, K codebook size, C code width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dalle_lean.images.vqgan import GumbelQuantizer, NearestQuantizer


class NearestLearner(nn.Module):
    """Plain VQ: each code moves to the running mean of the vectors it stands for (van den Oord et al. 2017,
    arXiv 1711.00937, appendix A.1), and unused codes restart where the codebook serves worst.

    Args:
        quantizer: its table is changed in place; it takes no gradient.
        decay: of the running means, per step.
        commitment: weight of the loss that keeps the encoder near its codes.
        restart_share: a code used less than this share of an even use restarts.
    """

    counts: Tensor
    sums: Tensor

    def __init__(
        self, quantizer: NearestQuantizer, *, decay: float = 0.99, commitment: float = 0.25, restart_share: float = 0.05
    ):
        super().__init__()
        # In a tuple the quantizer stays the VQGAN's: its weights are saved once.
        self.quantizers = (quantizer,)
        self.decay, self.commitment, self.restart_share = decay, commitment, restart_share
        quantizer.table.requires_grad_(False)
        self.register_buffer("counts", torch.zeros(len(quantizer.table)))  # vectors per step, running mean
        self.register_buffer("sums", torch.zeros_like(quantizer.table))

    def forward(self, z: Tensor, progress: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """z [N, C, h, w] float32 -> (code vectors with a straight-through gradient [N, C, h, w], loss).

        `progress` is the done share of the run, 0..1. Learns from z on the way.
        """
        quantizer = self.quantizers[0]
        vectors = z.detach().permute(0, 2, 3, 1).flatten(end_dim=2)  # [M, C]
        if not self.counts.any():
            self.initialize(vectors, generator)
        with torch.no_grad():
            codes = quantizer.scores(z).argmax(dim=1)  # [N, h, w]
            quantized = F.embedding(codes, quantizer.table).permute(0, 3, 1, 2)
            distances = (z - quantized).square().mean(dim=1).flatten()  # [M]
            self.learn(vectors, codes.flatten(), distances, restart=progress < 0.8, generator=generator)
        commitment_loss = self.commitment * F.mse_loss(z, quantized)
        return z + (quantized - z).detach(), commitment_loss

    def initialize(self, vectors: Tensor, generator: torch.Generator) -> None:
        """Place the codes on the first vectors seen."""
        rows = torch.randint(len(vectors), (len(self.counts),), generator=generator).to(vectors.device)
        self.place(torch.arange(len(self.counts), device=vectors.device), vectors[rows], len(vectors))

    def learn(
        self, vectors: Tensor, codes: Tensor, distances: Tensor, *, restart: bool, generator: torch.Generator
    ) -> None:
        """Move the running means by one step; `restart` gives unused codes new places."""
        size = len(self.counts)
        counts = torch.bincount(codes, minlength=size).float()
        sums = torch.zeros_like(self.sums).index_add_(0, codes, vectors)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        table = self.quantizers[0].table
        table.copy_(torch.where(self.counts[:, None] > 1e-5, self.sums / self.counts.clamp(min=1e-5)[:, None], table))
        unused = (self.counts < self.restart_share * len(vectors) / size).nonzero().flatten()
        if restart and len(unused) and distances.sum() > 0:
            # By distance, as in k-means++: drawn evenly, most would land on the plain grounds that already have codes.
            rows = torch.multinomial(distances.cpu(), len(unused), replacement=True, generator=generator)
            self.place(unused, vectors[rows.to(vectors.device)], len(vectors))

    @torch.no_grad()
    def place(self, codes: Tensor, vectors: Tensor, vectors_per_step: int) -> None:
        """Put `codes` [R] at `vectors` [R, C] as if they had been used evenly so far."""
        even_use = vectors_per_step / len(self.counts)
        self.counts[codes] = even_use
        self.sums[codes] = vectors * even_use
        self.quantizers[0].table[codes] = vectors


class GumbelLearner(nn.Module):
    """Gumbel-softmax (Jang et al. 2016, arXiv 1611.01144), straight through, at a temperature that falls; a divergence
    from even use keeps the codebook from collapsing.

    Args:
        quantizer: learns by gradient.
        first_temperature, last_temperature: at the beginning and at the end of the run; geometric between.
        divergence_weight: of the Kullback-Leibler divergence in the loss.
    """

    def __init__(
        self,
        quantizer: GumbelQuantizer,
        *,
        first_temperature: float = 1.0,
        last_temperature: float = 1 / 16,
        divergence_weight: float = 5e-4,
    ):
        super().__init__()
        self.quantizers = (quantizer,)
        self.first_temperature, self.last_temperature = first_temperature, last_temperature
        self.divergence_weight = divergence_weight

    def forward(self, z: Tensor, progress: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """z [N, C, h, w] float32 -> (code vectors with a straight-through gradient [N, C, h, w], loss).

        `progress` is the done share of the run, 0..1.
        """
        scores = self.quantizers[0].scores(z)  # [N, K, h, w]
        temperature = self.first_temperature * (self.last_temperature / self.first_temperature) ** progress
        noise = -torch.empty(scores.shape).exponential_(generator=generator).log().to(scores.device)
        soft = ((scores + noise) / temperature).softmax(dim=1)
        hard = torch.zeros_like(soft).scatter_(1, soft.argmax(dim=1, keepdim=True), 1.0)
        chosen = hard + soft - soft.detach()
        log_shares = scores.log_softmax(dim=1)
        divergence = (log_shares.exp() * (log_shares + math.log(scores.shape[1]))).sum(dim=1).mean()
        return torch.einsum("nkhw,kc->nchw", chosen, self.quantizers[0].table), self.divergence_weight * divergence


def codebook_learner(quantizer: GumbelQuantizer | NearestQuantizer) -> NearestLearner | GumbelLearner:
    """The learner for this kind of quantizer."""
    return NearestLearner(quantizer) if isinstance(quantizer, NearestQuantizer) else GumbelLearner(quantizer)
