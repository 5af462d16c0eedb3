"""Draws a code from each picture's logits on the CPU, compiled by numba: `filtering.py` and `noise.py` in one pass.

R pictures, C codebook.
"""

import math

import numpy as np
from numba import prange

from dalle_lean.compiled import compiled
from inference.sampling.noise import KEY_STEPS, MASK_32, MULTIPLIERS, ROUNDS


@compiled(parallel=True)
def draw(logits, least_plausible, guidance, top_k, top_p, temperature, seeds, pictures, step, out):
    """out [R] = a code of each picture; the settings are [R], of Settings.

    logits: [R, C], finite or -inf, or with guidance [2 R, C], those of the empty captions behind the others.
    least_plausible: the logarithm of `filtering.LEAST_PLAUSIBLE`, which the compiled code would not see change.
    seeds, pictures: low and high 32 bits, [2, R].
    """
    count, codes = len(out), logits.shape[1]
    for row in prange(count):
        x = np.empty(codes, np.float32)
        if len(logits) == count:
            for code in range(codes):
                x[code] = logits[row, code]
        else:
            guide(logits, row, np.uintp(count + row), least_plausible, guidance[row], x)
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
def guide(logits, conditional, null, least_plausible, guidance, x):
    """x [C] = `filtering.guide` of two rows of logits."""
    likeliest = np.float32(-np.inf)
    for code in range(len(x)):
        likeliest = max(likeliest, logits[conditional, code])
    least = likeliest + least_plausible
    for code in range(len(x)):
        given, without = logits[conditional, code], logits[null, code]
        x[code] = without + (given - without) * guidance if given >= least else np.float32(-np.inf)


@compiled()
def threshold(x, top_k, top_p):
    """The least of the logits x [C] that `filtering.filter_logits` keeps."""
    heap, size = np.empty(len(x), np.float32), 0
    for code in range(len(x)):
        if x[code] > -np.inf:
            heap[size] = x[code]
            size += 1
    limit = min(top_k, size) if top_k > 0 else size
    if size == 0 or (limit == size and top_p >= 1):
        return np.float32(-np.inf)
    for parent in range(size // 2 - 1, -1, -1):
        sift_down(heap, parent, size)
    falling, count, total = np.empty(size, np.float32), 0, 0.0
    while count < size and (count < limit or heap[0] == falling[limit - 1]):
        falling[count] = heap[0]
        total += math.exp(np.float64(heap[0]) - np.float64(falling[0]))
        count += 1
        heap[0] = heap[size - count]
        sift_down(heap, 0, size - count)
    if top_p < 1:
        mass = 0.0
        for i in range(count):
            mass += math.exp(np.float64(falling[i]) - np.float64(falling[0]))
            if mass > top_p * total:
                return falling[i]
    return falling[count - 1]


@compiled()
def sift_down(heap, parent, size):
    """Restore the order of a heap [size], largest first, in which only heap[parent] may be too small."""
    value = heap[parent]
    while 2 * parent + 1 < size:
        child = 2 * parent + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if value >= heap[child]:
            break
        heap[parent] = heap[child]
        parent = child
    heap[parent] = value


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
