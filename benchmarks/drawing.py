"""Pictures drawn as people get them, with the seconds of each phase.

R pictures, I codes in a picture, N prompts, T text length.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.roofline import now
from dalle_lean.images.vqgan import VQGAN
from inference.ranking import decode_and_score
from inference.sampling.decoder import Decoder
from inference.sampling.filtering import filter_logits, sample
from inference.sampling.kv_cache import KVCache
from inference.sampling.noise import GumbelNoise
from inference.sampling.prefill import read_prompts
from inference.sampling.sampler import Row, Sampling, sample_codes
from inference.scorer import Scorer


class Drawing(NamedTuple):
    """Codes and what they took, in seconds."""

    codes: Tensor
    """[R, I]."""
    prefill: float
    """Reading the prompt."""
    steps: float
    """Reading all codes but the last, KVCache.decode_step."""
    sampling: float
    """The rest: making the cache, filter, noise and choice."""
    cache_bytes: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.prefill + self.steps + self.sampling


class Painting(NamedTuple):
    """Seconds from codes to scores."""

    decode: float
    score: float


@dataclass
class Reads:
    """What was seen of KVCache.decode_step."""

    seconds: float = 0.0
    cache: KVCache | None = None


def draw(decoder: Decoder, text_ids: Tensor, batch: int) -> Drawing:
    """`batch` pictures of each prompt [N, T], with the defaults people get and seed 0."""
    device = decoder.device
    started = now(device)
    prompts = read_prompts(decoder, text_ids)
    read = now(device)
    with timed_reads(device) as reads:
        last = deque(sample_codes(decoder, prompts, rows(batch) * len(text_ids)), maxlen=1)
        done = now(device)
    assert reads.cache is not None, "there was more than one code to draw"
    return Drawing(last[0], read - started, reads.seconds, done - read - reads.seconds, reads.cache.num_bytes)


def rows(batch: int) -> list[Row]:
    """Pictures 0, 1, ... of a prompt."""
    return [Row(picture, Sampling()) for picture in range(batch)]


@contextmanager
def timed_reads(device: torch.device) -> Iterator[Reads]:
    """Every KVCache.decode_step inside is timed."""
    reads, read = Reads(), KVCache.decode_step

    def timed(cache: KVCache, codes: Tensor) -> Tensor:
        started = now(device)
        logits = read(cache, codes)
        reads.seconds += now(device) - started
        reads.cache = cache
        return logits

    KVCache.decode_step = timed  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        KVCache.decode_step = read  # type: ignore[method-assign]


def paint(codes: Tensor, prompt: str, vqgan: VQGAN, scorer: Scorer) -> Painting:
    """Decode and rank codes [R, I], one after the other."""
    device = codes.device
    started = now(device)
    ranked = list(decode_and_score(codes, prompt, vqgan))
    decoded = now(device)
    for part in ranked:
        scorer.score(part.pixels.permute(0, 3, 1, 2) / 255, prompt)
    return Painting(decoded - started, now(device) - decoded)


@torch.inference_mode()
def choices_after(decoder: Decoder, text_ids: Tensor, codes: Tensor) -> Tensor:
    """What this decoder would draw at every place after another's codes [R, I], with the same noise: [R, I]."""
    config, prompts = decoder.config, read_prompts(decoder, text_ids)
    batch = len(codes) // len(text_ids)
    cache = KVCache(decoder, prompts, len(codes))
    asked = rows(batch) * len(text_ids)
    noise = GumbelNoise(
        [row.sampling.seed for row in asked],
        [row.picture for row in asked],
        config.image_vocab_size,
        config.image_len,
        decoder.device,
    )
    logits, sampling, chosen = prompts.logits.repeat_interleave(batch, dim=0), Sampling(), torch.empty_like(codes)
    for step in range(config.image_len):
        allowed = filter_logits(logits, sampling.top_k, sampling.top_p)
        chosen[:, step] = sample(allowed, noise.at(step), sampling.temperature)
        if step + 1 < config.image_len:
            logits = cache.decode_step(codes[:, step])
    return chosen
