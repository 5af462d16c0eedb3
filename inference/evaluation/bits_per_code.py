"""How well a model predicts the codes of pictures that it never saw, in bits per image code.

Shapes: N pictures, T text length, I codes in a picture, C codebook size.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dalle_lean.progress import OnBatch, uncounted
from inference.generator import Generator

BATCH = 32


@dataclass(frozen=True, kw_only=True)
class BitsPerCode:
    """Mean bits of a held-out image code; lower is better."""

    model: float
    strangers_caption: float  # under another picture's caption, a different one where possible
    no_caption: float  # under an empty caption; says little about a model trained without caption dropout
    counts: float  # of a model that knows only how often each code occurs
    counts_by_place: float  # of a model that knows the counts at each place in the picture, smoothed by `counts`


@torch.inference_mode()
def measure_bits(
    generator: Generator,
    captions: list[str],
    codes: Tensor,
    train_codes: Tensor,
    on_batch: OnBatch = uncounted,
    seed: int = 0,
) -> BitsPerCode:
    """Measure on held-out captions and codes [N, I]; the count models learn from `train_codes` [M, I].

    seed: chooses the other picture whose caption each picture gets.
    """
    text_ids = generator.tokenizer.encode(captions, generator.model.config.text_len)
    strangers = text_ids[derangement(text_ids, torch.Generator().manual_seed(seed))]
    empty = torch.zeros_like(text_ids)  # as in caption dropout and guidance
    size = generator.vqgan.config.codebook_size
    by_place = np.stack([np.bincount(column, minlength=size) for column in train_codes.numpy().T])
    everywhere = smoothed(by_place.sum(axis=0)[None], np.full(size, 1 / size))
    return BitsPerCode(
        model=model_bits(generator, text_ids, codes, on_batch),
        strangers_caption=model_bits(generator, strangers, codes, on_batch),
        no_caption=model_bits(generator, empty, codes, on_batch),
        counts=count_bits(np.tile(everywhere, (len(by_place), 1)), codes.numpy()),
        counts_by_place=count_bits(smoothed(by_place, everywhere[0]), codes.numpy()),
    )


def derangement(text_ids: Tensor, generator: torch.Generator) -> Tensor:
    """A permutation [N] that moves as few rows of [N, T] as possible to an equal row's place: none, unless more than
    half of the rows are equal."""
    kind = text_ids.unique(dim=0, return_inverse=True)[1]
    kinds = int(kind.max()) + 1
    rows = torch.randperm(len(kind), generator=generator)
    side_by_side = torch.randperm(kinds, generator=generator)[kind[rows]].argsort(stable=True)
    circle = rows[side_by_side]
    order = torch.empty_like(circle)
    # Equal rows are neighbours on the circle, so a shift by the longest run of equal rows leaves every run.
    order[circle] = circle.roll(-int(kind.bincount().max()))
    return order


def model_bits(generator: Generator, text_ids: Tensor, codes: Tensor, on_batch: OnBatch = uncounted) -> float:
    """Mean cross-entropy, in bits, of an image code under the model, for text ids [N, T] and codes [N, I]."""
    nats = 0.0
    for text, image in zip(text_ids.split(BATCH), codes.split(BATCH), strict=True):
        losses = generator.model.losses(text.to(generator.device), image.to(generator.device))
        nats += float(losses[1]) * len(text)
        on_batch(len(text))
    return nats / len(codes) / math.log(2)


def smoothed(counts: NDArray[np.int64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities [I, C] from counts [I, C] and C pseudo-counts distributed as `prior` [C]."""
    size = len(prior)
    return (counts + size * prior) / (counts.sum(axis=1, keepdims=True) + size)


def count_bits(probabilities: NDArray[np.float64], codes: NDArray[np.int64]) -> float:
    """Mean bits of codes [N, I] under probabilities [I, C]."""
    return float(-np.log2(probabilities[np.arange(codes.shape[1])[None, :], codes]).mean())
