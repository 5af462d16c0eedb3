"""Sampling noise as a pure function of (seed, picture index, step, code): the same on every device and in every batch.

The hash is Philox-4x32 with ten rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

import torch
from torch import Tensor

MASK_32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Int64 tensors with values in 0..2^32-1."""


def philox_4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four words of 32 random bits for each counter of four words; the counter's shapes broadcast."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = multiply_32(word_0, MULTIPLIERS[0])
        high_1, low_1 = multiply_32(word_2, MULTIPLIERS[1])
        word_0, word_1, word_2, word_3 = high_1 ^ word_1 ^ key_0, low_1, high_0 ^ word_3 ^ key_1, low_0
        key_0, key_1 = (key_0 + KEY_STEPS[0]) & MASK_32, (key_1 + KEY_STEPS[1]) & MASK_32
    return word_0, word_1, word_2, word_3


def multiply_32(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product; by 16-bit halves, so that int64 never overflows."""
    upper, lower = (word >> 16) * factor, (word & 0xFFFF) * factor
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def check_seed(seed: int) -> None:
    """Raise ValueError unless 0 <= seed < 2^64."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed}: it must lie in 0..{2**64 - 1}")


def uniform_noise(seed: int, picture_B: Tensor, step: int, codes: int) -> Tensor:
    """Float32 [B, codes] in the open interval (0, 1), for the pictures with the indices `picture_B` (int64)."""
    block = torch.arange((codes + 3) // 4, device=picture_B.device)[None, :]
    picture = picture_B[:, None]
    counter = (block, picture & MASK_32, torch.full_like(block, step), picture >> 32)
    words = torch.stack(torch.broadcast_tensors(*philox_4x32(counter, (seed & MASK_32, seed >> 32))), dim=-1)
    bits_BC = words.flatten(1)[:, :codes]
    # 23 bits and a half: exact in float32, and never 0 or 1.
    return ((bits_BC >> 9).float() + 0.5) * 2.0**-23


def gumbel_noise(seed: int, picture_B: Tensor, step: int, codes: int) -> Tensor:
    """Float32 Gumbel noise [B, codes]: argmax(log p + noise) is a draw from p.

    Logarithms are taken in float64, so that devices agree after rounding to float32.
    """
    return -torch.log(-torch.log(uniform_noise(seed, picture_B, step, codes).double())).float()
