"""Draws codes one by one for a batch of pictures of one or several prompts.

N prompts, R rows: R / N pictures for each prompt, in the prompts' order; I codes in a picture.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference.request import Settings
from inference.sampling.filtering import filter_logits, guide, sample
from inference.sampling.kv_cache import kv_cache
from inference.sampling.noise import GumbelNoise
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import Prompts


@dataclass(frozen=True)
class Row:
    """One picture to draw, by its index among those of its prompt and seed."""

    picture: int
    settings: Settings


@torch.inference_mode()
def sample_codes(decoder: PackedDecoder, prompts: Prompts, rows: Sequence[Row]) -> Iterator[Tensor]:
    """Draw pictures; yields their codes so far, [R, n] for n = m + 1..I, where m codes are given with the prompts.

    A picture depends on its prompt, sampling settings and index, not on the other rows. Close the iterator to cancel,
    which keeps nothing.
    """
    config, device = decoder.config, decoder.device
    given, guided = prompts.num_codes, prompts.guided
    guidance = torch.tensor([row.settings.guidance for row in rows], device=device)[:, None]
    assert guided or all(row.settings.guidance == 1 for row in rows), "guidance needs the empty captions"
    copies = 2 if guided else 1
    per_prompt = copies * len(rows) // prompts.count
    top_k, top_p, temperature = (
        torch.tensor([getattr(row.settings, name) for row in rows], device=device)
        for name in ("top_k", "top_p", "temperature")
    )
    largest_k = 0 if any(row.settings.top_k == 0 for row in rows) else max(row.settings.top_k for row in rows)
    unfiltered = all(row.settings.top_k == 0 and row.settings.top_p == 1 for row in rows)
    seeds, pictures = [row.settings.seed for row in rows], [row.picture for row in rows]
    noise = GumbelNoise(seeds, pictures, config.image_vocab_size, config.image_len, device)
    codes = torch.empty(len(rows), config.image_len, dtype=torch.long, device=device)
    codes[:, :given] = prompts.codes[: prompts.count // copies].repeat_interleave(per_prompt, dim=0)
    logits = prompts.logits.repeat_interleave(per_prompt, dim=0)
    with kv_cache(decoder, prompts, copies * len(rows)) as cache:
        for step in range(given, config.image_len):
            if guided:
                conditional, null = logits.chunk(2)
                logits = guide(conditional, null, guidance)
            if not unfiltered:
                logits = filter_logits(logits, top_k, top_p, largest_k)
            codes[:, step] = sample(logits, noise.at_kept(step, logits), temperature)
            yield codes[:, : step + 1]
            if step + 1 < config.image_len:
                logits = cache.decode_step(codes[:, step].repeat(copies))
