"""Draws codes one by one for a batch of pictures of one or several prompts: guidance, top-k and top-p, temperature and
noise.

N prompts, R rows: R / N pictures for each prompt, in the prompts' order; I codes in a picture; C codebook.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference.request import Settings
from inference.sampling.compiled_step import kernels_for
from inference.sampling.filtering import LEAST_PLAUSIBLE, filter_logits, guide, sample
from inference.sampling.kv_cache import kv_cache
from inference.sampling.noise import GumbelNoise
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import Prompts

LOG_LEAST_PLAUSIBLE = np.float32(math.log(LEAST_PLAUSIBLE))
CODES_PER_THREAD = 2**12
"""For fewer, another thread is not worth waiting for."""


@dataclass(frozen=True)
class Row:
    """One picture to draw, by its index among those of its prompt and seed."""

    picture: int
    settings: Settings


class Draw:
    """Draws for the same pictures at every step."""

    def __init__(self, decoder: PackedDecoder, rows: Sequence[Row]):
        self.kernels, config = kernels_for(decoder), decoder.config

        def of_each(name: str, dtype: torch.dtype) -> Tensor:
            return torch.tensor([getattr(row.settings, name) for row in rows], dtype=dtype, device=decoder.device)

        self.guidance, self.temperature = (of_each(name, torch.float32) for name in ("guidance", "temperature"))
        self.top_k, self.top_p = of_each("top_k", torch.int64), of_each("top_p", torch.float32)
        self.unfiltered = all(row.settings.top_k == 0 and row.settings.top_p == 1 for row in rows)
        self.largest_k = 0 if any(row.settings.top_k == 0 for row in rows) else max(row.settings.top_k for row in rows)
        seeds, pictures = [row.settings.seed for row in rows], [row.picture for row in rows]
        self.noise = GumbelNoise(seeds, pictures, config.image_vocab_size, config.image_len, decoder.device)
        if self.kernels is not None:
            settings = self.guidance, self.top_k, self.top_p, self.temperature
            words = self.noise.seed.to(torch.uint64), self.noise.picture.to(torch.uint64)
            self.arrays = [tensor.numpy() for tensor in (*settings, *words)]

    def __call__(self, step: int, logits: Tensor) -> Tensor:
        """Logits [R, C], or [2 R, C] with those of the empty captions behind the others -> codes [R]."""
        if self.kernels is not None:
            codes = torch.empty(len(self.guidance), dtype=torch.int64)
            self.kernels.use_threads(min(torch.get_num_threads(), max(1, logits.numel() // CODES_PER_THREAD)))
            self.kernels.draw_kernel.draw(logits.numpy(), LOG_LEAST_PLAUSIBLE, *self.arrays, step, codes.numpy())
            return codes
        if len(logits) > len(self.guidance):
            conditional, null = logits.chunk(2)
            logits = guide(conditional, null, self.guidance[:, None])
        if not self.unfiltered:
            logits = filter_logits(logits, self.top_k, self.top_p, self.largest_k)
        return sample(logits, self.noise.at(step), self.temperature)


@torch.inference_mode()
def sample_codes(decoder: PackedDecoder, prompts: Prompts, rows: Sequence[Row]) -> Iterator[Tensor]:
    """Draw pictures; yields their codes so far, [R, n] for n = m + 1..I, where m codes are given with the prompts.

    A picture depends on its prompt, sampling settings and index, not on the other rows. Close the iterator to cancel,
    which keeps nothing.
    """
    config, given = decoder.config, prompts.num_codes
    assert prompts.guided or all(row.settings.guidance == 1 for row in rows), "guidance needs the empty captions"
    copies = 2 if prompts.guided else 1
    per_prompt = copies * len(rows) // prompts.count
    draw = Draw(decoder, rows)
    codes = torch.empty(len(rows), config.image_len, dtype=torch.long, device=decoder.device)
    codes[:, :given] = prompts.codes[: prompts.count // copies].repeat_interleave(per_prompt, dim=0)
    logits = prompts.logits.repeat_interleave(per_prompt, dim=0)
    with kv_cache(decoder, prompts, copies * len(rows)) as cache:
        for step in range(given, config.image_len):
            codes[:, step] = draw(step, logits)
            yield codes[:, : step + 1]
            if step + 1 < config.image_len:
                logits = cache.decode_step(codes[:, step].repeat(copies))
