"""Codes -> pictures and their scores, batch by batch within a memory limit.

Shapes: N pictures, I codes in a picture, H x W pixels.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from dalle_lean.errors import UserError, is_out_of_memory
from dalle_lean.images.files import to_uint8
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from inference.request import Picture
from inference.scorer import Scorer

T = TypeVar("T")
DECODE_BUDGET_BYTES = 2**31
# Convolutions round differently for other numbers of pictures. So this number depends only on the model and its picture
# size, and the last batch is padded: picture i is the same, however many are drawn.
DECODE_BATCH = 8
BLANK_DISTANCE, BLANK_SHARE = 16, 0.002
"""A picture is of one colour if less than this share of its pixels is farther than this distance, of 0..255, from the
median in some channel."""


class Ranked(NamedTuple):
    """Some of the pictures, in the order of their codes, on the device, which may still be computing them."""

    pixels: Tensor  # [n, H, W, 3] uint8
    scores: Tensor | None  # [n]; None if nothing ranks them


@torch.inference_mode()
def decode_and_score(
    codes: Tensor, prompt: str, vqgan: VQGAN, scorer: Scorer | None = None, bf16: bool = False
) -> Iterator[Ranked]:
    """Pictures and scores of codes [N, I], `decode_batch_size` at a time; `collect` gathers them. A batch of the same
    codes as an earlier one is not decoded again: of a narrow distribution all candidates may be alike.

    If a batch does not fit the device's memory, it and all later ones are halved, with a warning. `bf16` decodes in
    bfloat16; scores keep their precision. ValueError for codes that this VQGAN does not have, scores of a wrong shape,
    or no memory for even one picture.
    """
    side = vqgan.check_codes(codes)
    size = decode_batch_size(vqgan.config, side)
    on_host, codes, start = codes.cpu().numpy(), codes.to(vqgan.quantize.table.device), 0
    known: dict[bytes, Ranked] = {}
    # Nothing in the loop waits for a CUDA device, so the next batch is queued while it still scores. On a CPU, decoding
    # and scoring alternate: with a thread for scoring, two cores took 10 % longer with the bundled CLIP and 18 % less
    # with a ViT-S-32 (128 pictures), not enough to require that every scorer be thread-safe.
    while start < len(codes):
        part = slice(start, start + size)
        key = on_host[part].tobytes()
        ranked = known.get(key) or try_batch(codes[part], prompt, vqgan, scorer, size, bf16)
        if ranked is not None:
            known[key] = ranked
            yield ranked
            start += size
            continue
        if size == 1:
            pixels = side * vqgan.config.downscale
            raise UserError(
                f"{codes.device}: no memory to decode and score one picture of {pixels} pixels; free some or use cpu"
            )
        size //= 2
        torch.cuda.empty_cache()
        warnings.warn(f"out of memory on {codes.device}: decoding {size} pictures at once from here on", stacklevel=2)


def try_batch(codes: Tensor, prompt: str, vqgan: VQGAN, scorer: Scorer | None, size: int, bf16: bool) -> Ranked | None:
    """Up to `size` pictures, padded to `size` for the computation; None if the device has too little memory."""
    wanted = len(codes)
    try:
        with torch.autocast(codes.device.type, torch.bfloat16, enabled=bf16):
            pixels = vqgan.decode_checked(pad(codes, (0, 0, 0, size - wanted))).float()
        scores = None
        if scorer is not None:
            scores = scorer.score(pixels, prompt)
            if scores.shape != (size,):
                shape = list(scores.shape)
                raise UserError(f"scorer {scorer.name}: scores of shape {shape} for {size} pictures; must be [{size}]")
            scores = scores[:wanted]
        return Ranked(to_uint8(pixels[:wanted]).permute(0, 2, 3, 1), scores)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None  # by now the tensors that the error held are released


def collect(batches: Iterable[Ranked]) -> tuple[list[Image.Image], list[float] | None]:
    """All pictures and scores, after waiting for the device; scores is None if nothing ranked them.

    ValueError for a score that is not finite: it cannot be ranked.
    """
    done = list(batches)
    images = [Image.fromarray(values) for ranked in done for values in ranked.pixels.cpu().numpy()]
    if any(ranked.scores is None for ranked in done):
        return images, None
    scores = [score for ranked in done if ranked.scores is not None for score in ranked.scores.tolist()]
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            raise UserError(f"the scorer gave picture {index} the score {score}; it must be a finite number")
    return images, scores


def best_pictures(
    codes: Tensor, images: Sequence[Image.Image], scores: Sequence[float] | None, count: int, first: int = 0
) -> list[Picture]:
    """The `count` best pictures of codes [N, I], best first, duplicates after all different ones; without scores the
    first ones.

    first: index of the first picture.
    """
    order: Sequence[int] = range(len(images))
    if scores:
        by_score = sorted(order, key=lambda index: (-scores[index], index))
        order = equal_ones_last(by_score, lambda index: tuple(codes[index].tolist()))
    ranked = ((index, scores[index] if scores else None) for index in order[:count])
    return [Picture(images[index], score, first + index, codes[index].cpu()) for index, score in ranked]


def all_alike(pictures: Sequence[Picture]) -> bool:
    """Whether there are several pictures and all have the same codes."""
    return len(pictures) > 1 and all(torch.equal(pictures[0].codes, other.codes) for other in pictures[1:])


def all_blank(pictures: Sequence[Picture]) -> bool:
    """Whether each picture is of one colour, up to what decoding changes: no thing is drawn in any."""
    return all(is_blank(np.asarray(picture.image.convert("RGB"), dtype=np.int16)) for picture in pictures)


def is_blank(pixels: NDArray[np.int16]) -> bool:
    """Whether nearly all pixels [H, W, 3] have the same colour; decoding may spoil those at the corners."""
    distance = np.abs(pixels - np.median(pixels, axis=(0, 1))).max(axis=2)
    return bool((distance > BLANK_DISTANCE).mean() < BLANK_SHARE)


def equal_ones_last(ranked: Iterable[T], codes_of: Callable[[T], Hashable]) -> list[T]:
    """Ranked pictures, with those last whose codes equal a better one's: four equal pictures are no choice."""
    seen: set[Hashable] = set()
    different: list[T] = []
    equal: list[T] = []
    for picture in ranked:
        codes = codes_of(picture)
        (equal if codes in seen else different).append(picture)
        seen.add(codes)
    return different + equal


def decode_batch_size(config: VQGANConfig, side: int) -> int:
    """How many pictures of side x side codes to decode at once: 8, halved until they fit the budget, at least 1."""
    size = DECODE_BATCH
    while size > 1 and size * decode_bytes(config, side) > DECODE_BUDGET_BYTES:
        size //= 2
    return size


def decode_bytes(config: VQGANConfig, side: int) -> int:
    """Peak bytes of float32 tensors when decoding one picture of side x side codes. Convolution workspaces come on top;
    they differ between libraries."""
    last_level = len(config.channel_multipliers) - 1
    most, width = 0, config.channels * config.channel_multipliers[-1]
    # The blocks that attend were chosen for pictures of picture_side, and are the same for others.
    built_side = config.image_side
    for level in range(last_level, -1, -1):
        places, out_width = side * side, config.channels * config.channel_multipliers[level]
        # At x * sigmoid(x) a block holds its input, norm, sigmoid and product, before and after its width changes.
        most = max(most, 4 * places * width, places * (width + 3 * out_width))
        if level == last_level or built_side in config.attention_resolutions:
            # Input, norm, query, key and value, and twice the attention weights.
            most = max(most, places * (5 * out_width + 2 * places))
        # Upsampling needs less than the first block after it.
        width, side, built_side = out_width, 2 * side, 2 * built_side
    return 4 * most
