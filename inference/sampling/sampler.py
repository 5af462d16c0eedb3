"""Draws codes one by one for a batch of pictures of one or several prompts.

N prompts, R rows: R / N pictures for each prompt, in the prompts' order; I codes in a picture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.io.model_folder import check_guidance
from inference.sampling.filtering import filter_logits, sample
from inference.sampling.kv_cache import kv_cache
from inference.sampling.noise import GumbelNoise
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import Prompts

HIGHEST_TEMPERATURE = 1e6


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How codes are drawn; the defaults are the paper's. ValueError outside the ranges."""

    top_k: int = 256
    """Draw only from the k most likely codes; 0 is off."""
    top_p: float = 0.75
    """Draw only from the most likely codes that make up this probability, 0..1; 1 is off."""
    temperature: float = 1.0
    """0 takes the most likely code each time."""
    seed: int = 0
    """0..2^64-1."""
    guidance: float = 1.0
    """Scale of classifier-free guidance (Ho and Salimans 2022), for models trained with caption dropout; 1 is off."""

    def __post_init__(self) -> None:
        if not 0 <= self.top_k < 2**31:
            raise UserError(f"top_k={self.top_k}: it must be 0 (off) or the number of codes to keep")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: it must lie in 0..1 (1 is off)")
        if not 0 <= self.temperature <= HIGHEST_TEMPERATURE:
            raise UserError(f"temperature={self.temperature}: it must lie in 0 (greedy)..{HIGHEST_TEMPERATURE:g}")
        check_guidance(self.guidance)
        if not 0 <= self.seed < 2**64:
            raise UserError(f"seed={self.seed}: it must lie in 0..{2**64 - 1}")


@dataclass(frozen=True)
class Row:
    """One picture to draw, by its index among those of its prompt and seed."""

    picture: int
    sampling: Sampling


@torch.inference_mode()
def sample_codes(decoder: PackedDecoder, prompts: Prompts, rows: Sequence[Row]) -> Iterator[Tensor]:
    """Draw pictures; yields their codes so far, [R, n] for n = m + 1..I, where m codes are given with the prompts.

    A picture depends on its prompt, sampling settings and index, not on the other rows. Close the iterator to cancel,
    which keeps nothing.
    """
    config, device = decoder.config, decoder.device
    given, guided = prompts.num_codes, prompts.guided
    guidance = torch.tensor([row.sampling.guidance for row in rows], device=device)[:, None]
    assert guided or all(row.sampling.guidance == 1 for row in rows), "guidance needs the empty captions"
    copies = 2 if guided else 1
    per_prompt = copies * len(rows) // prompts.count
    top_k, top_p, temperature = (
        torch.tensor([getattr(row.sampling, name) for row in rows], device=device)
        for name in ("top_k", "top_p", "temperature")
    )
    largest_k = 0 if any(row.sampling.top_k == 0 for row in rows) else max(row.sampling.top_k for row in rows)
    unfiltered = all(row.sampling.top_k == 0 and row.sampling.top_p == 1 for row in rows)
    seeds, pictures = [row.sampling.seed for row in rows], [row.picture for row in rows]
    noise = GumbelNoise(seeds, pictures, config.image_vocab_size, config.image_len, device)
    codes = torch.empty(len(rows), config.image_len, dtype=torch.long, device=device)
    codes[:, :given] = prompts.codes[: prompts.count // copies].repeat_interleave(per_prompt, dim=0)
    logits = prompts.logits.repeat_interleave(per_prompt, dim=0)
    with kv_cache(decoder, prompts, copies * len(rows)) as cache:
        for step in range(given, config.image_len):
            if guided:
                conditional, null = logits.chunk(2)
                logits = null + (conditional - null) * guidance
            if not unfiltered:
                logits = filter_logits(logits, top_k, top_p, largest_k)
            codes[:, step] = sample(logits, noise.at_kept(step, logits), temperature)
            yield codes[:, : step + 1]
            if step + 1 < config.image_len:
                logits = cache.decode_step(codes[:, step].repeat(copies))
