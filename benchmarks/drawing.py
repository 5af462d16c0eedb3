"""Draws pictures as users get them, and times each phase.

R pictures, I codes in a picture, N prompts, T text length.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.timing import now
from dalle_lean.images.vqgan import VQGAN
from inference.ranking import decode_and_score
from inference.request import Settings
from inference.sampling.filtering import filter_logits, sample
from inference.sampling.kv_cache import KVCache
from inference.sampling.noise import GumbelNoise
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import read_prompts
from inference.sampling.sampler import Row, sample_codes
from inference.scorer import Scorer


class Drawing(NamedTuple):
    """Codes, and the time and memory that drawing them took."""

    codes: Tensor
    """[R, I]."""
    prefill_s: float
    """Prefill of the prompt."""
    steps_s: float
    """KVCache.decode_step for all codes but the last."""
    sampling_s: float
    """The rest: making the cache, filtering, noise and sampling."""
    cache_bytes: int

    @property
    def total_s(self) -> float:
        """All phases together."""
        return self.prefill_s + self.steps_s + self.sampling_s


class RenderTimes(NamedTuple):
    """Seconds from codes to scores."""

    decode_s: float
    score_s: float


def draw(decoder: PackedDecoder, text_ids: Tensor, batch: int, guidance: float = 1.0) -> Drawing:
    """Draw `batch` pictures of each prompt [N, T], with the default settings and seed 0. On CUDA it draws once before,
    which records the graphs of this batch size."""
    device, read, guided = decoder.device, KVCache.decode_step, guidance != 1
    pictures = rows(batch, guidance) * len(text_ids)
    if device.type == "cuda":
        deque(sample_codes(decoder, read_prompts(decoder, text_ids, guided=guided), pictures), maxlen=0)
    steps_s, cache_bytes = 0.0, 0

    def timed_read(cache: KVCache, codes: Tensor) -> Tensor:
        nonlocal steps_s, cache_bytes
        started = now(device)
        logits = read(cache, codes)
        steps_s += now(device) - started
        cache_bytes = cache.num_bytes
        return logits

    started = now(device)
    prompts = read_prompts(decoder, text_ids, guided=guided)
    prefilled = now(device)
    KVCache.decode_step = timed_read  # type: ignore[method-assign, assignment]
    try:
        [codes] = deque(sample_codes(decoder, prompts, pictures), maxlen=1)
    finally:
        KVCache.decode_step = read  # type: ignore[method-assign]
    return Drawing(codes, prefilled - started, steps_s, now(device) - prefilled - steps_s, cache_bytes)


def rows(batch: int, guidance: float = 1.0) -> list[Row]:
    """Pictures 0, 1, ... of a prompt."""
    return [Row(picture, Settings(guidance=guidance)) for picture in range(batch)]


def render(codes: Tensor, prompt: str, vqgan: VQGAN, scorer: Scorer) -> RenderTimes:
    """Decode codes [R, I], then rank the pictures."""
    device = codes.device
    started = now(device)
    ranked = list(decode_and_score(codes, prompt, vqgan))
    decoded = now(device)
    for part in ranked:
        scorer.score(part.pixels.permute(0, 3, 1, 2) / 255, prompt)
    return RenderTimes(decoded - started, now(device) - decoded)


@torch.inference_mode()
def choices_after(decoder: PackedDecoder, text_ids: Tensor, codes: Tensor) -> Tensor:
    """The codes [R, I] that this decoder would draw after each of the given codes' prefixes, with the same noise."""
    config, prompts = decoder.config, read_prompts(decoder, text_ids)
    batch = len(codes) // len(text_ids)
    cache = KVCache(decoder, prompts, len(codes))
    settings, pictures = Settings(), list(range(batch)) * len(text_ids)
    seeds = [settings.seed] * len(codes)
    noise = GumbelNoise(seeds, pictures, config.image_vocab_size, config.image_len, decoder.device)
    logits, chosen = prompts.logits.repeat_interleave(batch, dim=0), torch.empty_like(codes)
    for step in range(config.image_len):
        allowed = filter_logits(logits, settings.top_k, settings.top_p)
        chosen[:, step] = sample(allowed, noise.at(step), settings.temperature)
        if step + 1 < config.image_len:
            logits = cache.decode_step(codes[:, step])
    return chosen
