"""Sampling noise as a pure function of (seed, picture index, step, code): the same on every device and in every batch.

The hash is Philox-4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

R pictures, C codebook, B blocks of four codes that share a hash.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

MASK_32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# Enough to hide the cost of launching an operation, few enough for a core's cache.
COUNTERS_AT_ONCE = 2**15

Words = tuple[Tensor, Tensor, Tensor, Tensor]  # int64 tensors with values in 0..2^32-1


def philox_4x32(counter: Words, key: tuple[Tensor | int, Tensor | int]) -> Words:
    """Four words of 32 random bits for each counter of four words; the key's shape broadcasts to the counter's."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(ROUNDS):
        # Products of 32-bit words overflow int64, but their 64 bits are right.
        product_0, product_1 = word_0 * MULTIPLIERS[0], word_2 * MULTIPLIERS[1]
        word_0, word_2 = (
            (product >> 32).bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(MASK_32)
            for product, word, key in ((product_1, word_1, key_0), (product_0, word_3, key_1))
        )
        word_1, word_3 = product_1.bitwise_and_(MASK_32), product_0.bitwise_and_(MASK_32)
        key_0, key_1 = (key_0 + KEY_STEPS[0]) & MASK_32, (key_1 + KEY_STEPS[1]) & MASK_32
    return word_0, word_1, word_2, word_3


class GumbelNoise:
    """The noise of a batch of pictures, computed for a few steps at once."""

    def __init__(
        self, seeds: Sequence[int], pictures: Sequence[int], codes: int, steps: int, device: torch.device | str = "cpu"
    ):
        """Noise of `codes` C for each of `steps`; seeds and pictures of each row are in 0..2^64-1."""
        self.codes, self.steps = codes, steps
        self.seed, self.picture = words(seeds, device), words(pictures, device)
        self.at_once = max(1, COUNTERS_AT_ONCE // (len(seeds) * -(-codes // 4)))
        self.first, self.noise = 0, torch.empty(0)

    def at(self, step: int) -> Tensor:
        """Gumbel noise of a step, float32 [R, C]: argmax(log p + noise) is a draw from p."""
        if not self.first <= step < self.first + len(self.noise):
            self.first = step
            device = self.seed.device
            steps = torch.arange(step, min(step + self.at_once, self.steps), device=device)[:, None, None]
            rows = torch.arange(self.seed.shape[1], device=device)[:, None]
            self.noise = gumbel(self.uniform(steps, rows, torch.arange(-(-self.codes // 4), device=device)))
        return self.noise[step - self.first].flatten(1)[:, : self.codes]

    def uniform(self, step: Tensor, row: Tensor, block: Tensor) -> Tensor:
        """Uniform noise in the open interval (0, 1), float32 [.., 4], for each block's codes; the indices broadcast."""
        seed, picture = self.seed[:, row], self.picture[:, row]
        counter = torch.broadcast_tensors(block, picture[0], step, picture[1])
        bits = torch.stack(philox_4x32(tuple(counter), (seed[0], seed[1])), dim=-1)  # type: ignore[arg-type]
        # 23 bits plus one half: exact in float32, and never 0 or 1.
        return (bits >> 9).float().add_(0.5).mul_(2.0**-23)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform noise, in float64 so that devices agree after rounding to float32."""
    return uniform.double().log_().neg_().log_().neg_().float()


def words(numbers: Sequence[int], device: torch.device | str) -> Tensor:
    """The low and high 32 bits of each number, int64 [2, R]."""
    return torch.tensor([[number & MASK_32 for number in numbers], [number >> 32 for number in numbers]], device=device)
