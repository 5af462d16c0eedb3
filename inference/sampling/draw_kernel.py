"""Draws a code from each picture's logits on the CPU, compiled by numba: `filtering.py` and `noise.py` in one pass.

R pictures, C codebook.
"""

import math

import numpy as np
from numba import prange

from dalle_lean.compiled import compiled
from inference.sampling.filtering import LEAST_PLAUSIBLE
from inference.sampling.noise import KEY_STEPS, MASK_32, MULTIPLIERS, ROUNDS

LOG_LEAST_PLAUSIBLE = math.log(LEAST_PLAUSIBLE)


@compiled(parallel=True)
def draw(logits, guidance, top_k, top_p, temperature, seeds, pictures, step, out):
    """out [R] = a code of each picture; the settings are [R], of Settings.

    logits: [R, C], or with guidance [2 R, C], those of the empty captions behind the others.
    seeds, pictures: low and high 32 bits, [2, R].
    """
    count, codes = len(out), logits.shape[1]
    for row in prange(count):
        x = np.empty(codes, np.float32)
        if len(logits) == count:
            for code in range(codes):
                x[code] = logits[row, code]
        else:
            guide(logits, row, np.uintp(count + row), guidance[row], x)
        least = threshold(x, top_k[row], top_p[row])
        divisor = temperature[row] if temperature[row] > 0 else np.float32(1)
        best, highest, block = 0, np.float32(-np.inf), -1
        words = (np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0))
        for code in range(codes):
            if x[code] < least or x[code] == -np.inf:
                continue
            score = x[code] / divisor
            if temperature[row] > 0:
                if code // 4 != block:
                    block = code // 4
                    counter = (np.uint64(block), pictures[0, row], np.uint64(step), pictures[1, row])
                    words = philox_4x32(counter, seeds[0, row], seeds[1, row])
                score += gumbel(words[code % 4])
            if score > highest:
                best, highest = code, score
        out[row] = best


@compiled()
def guide(logits, conditional, null, guidance, x):
    """x [C] = `filtering.guide` of two rows of logits."""
    likeliest = np.float32(-np.inf)
    for code in range(len(x)):
        likeliest = max(likeliest, logits[conditional, code])
    least = likeliest + np.float32(LOG_LEAST_PLAUSIBLE)
    for code in range(len(x)):
        given, without = logits[conditional, code], logits[null, code]
        x[code] = without + (given - without) * guidance if given >= least else np.float32(-np.inf)


@compiled()
def threshold(x, top_k, top_p):
    """The least of the logits x [C] that `filtering.filter_logits` keeps."""
    kept = np.empty(len(x), np.float32)
    count = 0
    for code in range(len(x)):
        if x[code] > -np.inf:
            kept[count] = x[code]
            count += 1
    kept, least = kept[:count], np.float32(-np.inf)
    if 0 < top_k < count:
        least = np.partition(kept, count - top_k)[count - top_k]
        kept = kept[kept >= least]
    if top_p >= 1 or count == 0:
        return least
    rising = np.sort(kept)
    weights, total = np.empty(len(rising), np.float64), 0.0
    for i in range(len(rising) - 1, -1, -1):
        weights[i] = math.exp(np.float64(rising[i]) - np.float64(rising[-1]))
        total += weights[i]
    mass = 0.0
    for i in range(len(rising) - 1, -1, -1):
        mass += weights[i]
        if mass > top_p * total:
            return rising[i]
    return rising[0]


@compiled()
def philox_4x32(counter, key_0, key_1):
    """`noise.philox_4x32` of one counter, in uint64."""
    mask = np.uint64(MASK_32)
    word_0, word_1, word_2, word_3 = counter
    for _ in range(ROUNDS):
        product_0, product_1 = word_0 * np.uint64(MULTIPLIERS[0]), word_2 * np.uint64(MULTIPLIERS[1])
        word_0, word_2 = (product_1 >> np.uint64(32)) ^ word_1 ^ key_0, (product_0 >> np.uint64(32)) ^ word_3 ^ key_1
        word_1, word_3 = product_1 & mask, product_0 & mask
        key_0, key_1 = (key_0 + np.uint64(KEY_STEPS[0])) & mask, (key_1 + np.uint64(KEY_STEPS[1])) & mask
    return word_0, word_1, word_2, word_3


@compiled()
def gumbel(bits):
    """Gumbel noise from 32 random bits, float32."""
    uniform = (np.float32(bits >> np.uint64(9)) + np.float32(0.5)) * np.float32(2.0**-23)
    return np.float32(-math.log(-math.log(np.float64(uniform))))
