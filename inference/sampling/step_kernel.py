"""What a decoding step does between its products with weights, compiled by numba for the CPU.

Each picture's numbers are summed in the same order whatever the batch and the number of threads. bfloat16 numbers come
and go as their bits, uint16.

R pictures, D hidden size, H heads, d head size, N prompts, r rows of a prompt, P text positions, n cells read.
"""

import math

import numpy as np
from numba import prange, types
from numba.extending import overload

from dalle_lean.compiled import compiled
from inference.sampling.register_kernel import (
    GROUP,
    add_products,
    dot,
    largest_of,
    multiply_add,
    prefetch,
    total_of,
    total_of_squares,
)

CACHE_LINE_BYTES = 64
MOST_FETCHED = 4096
"""Numbers of a picture's keys, and of its values, that are fetched ahead, at most: more would push one another out of
the cache."""


def widened(number):
    """A number of an array as float32."""


@overload(widened, inline="always")
def _widened(number):
    if isinstance(number, types.Integer):
        return lambda number: np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
    return lambda number: number


def narrowed(number, out):
    """A float32 number for array `out`, rounded to nearest even if that holds bfloat16."""


@overload(narrowed, inline="always")
def _narrowed(number, out):
    def bits_of_bfloat16(number, out):
        bits = np.float32(number).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return bits_of_bfloat16 if isinstance(out.dtype, types.Integer) else lambda number, out: number


# No loop slices an array that threads share: they would contend for its count of references. Indices that the compiler
# cannot know to be positive are made unsigned: a check for negative ones would keep the loop from being vectorized.


@compiled(parallel=True)
def add_and_prepare(stream, delta, scale, weight, bias, eps, inputs, branch, column, out):
    """stream [R, D] += delta [R, D] * scale [D]; out [R, D] = its LayerNorm, token-shifted.

    The shifted channels come from `inputs` [branches, columns, R, D / 2] (or 0 instead of D / 2: no token shift): the
    first half from the code above, the second from the left neighbour. This code's take their place.
    """
    hidden, half = np.uintp(stream.shape[1]), np.uintp(inputs.shape[3])
    quarter = half // np.uintp(2)
    branch, column, left = np.uintp(branch), np.uintp(column), np.uintp(max(column - 1, 0))
    for row in prange(len(stream)):
        for i in range(hidden):
            stream[row, i] += widened(delta[row, i]) * scale[i]
        mean = total_of(stream, row) / np.float32(hidden)
        variance = total_of_squares(stream, row, mean) / np.float32(hidden)
        inverse = np.float32(1) / np.sqrt(variance + eps)
        for i in range(quarter):
            out[row, i] = narrowed(inputs[branch, column, row, i], out)
        if column > 0:
            for i in range(quarter, half):
                out[row, i] = narrowed(inputs[branch, left, row, i], out)
        else:
            for i in range(quarter, half):
                out[row, i] = 0
        for i in range(half):
            inputs[branch, column, row, i] = (stream[row, i] - mean) * inverse * weight[i] + bias[i]
        for i in range(half, hidden):
            out[row, i] = narrowed((stream[row, i] - mean) * inverse * weight[i] + bias[i], out)


@compiled(parallel=True)
def attend(qkv, rotation, keys, values, bias, first, cell, text_keys, text_values, prompts, threads, out):
    """Rotate qkv [R, 3 H d], write keys and values to their cell, and attend to the prompt and the cells read.

    rotation: [3, d], pairs of cosine and sine for queries (times the scores' scale), keys and values.
    keys, values: [H N r cells, d]; the cells first..first + n are read, with `bias` [n].
    text_keys, text_values: [H N d, P] and [H N P, d].
    prompts: N.
    threads: that run it; numba would not cache a kernel that asks for their number.
    out: [R, H d].
    """
    head_size, num_text, seen = rotation.shape[1], text_keys.shape[1], len(bias)
    heads, per_prompt = out.shape[1] // head_size, len(qkv) // prompts
    num_cells = len(keys) // (heads * len(qkv))
    fetched, line = min(seen * head_size, MOST_FETCHED), CACHE_LINE_BYTES // keys.itemsize
    groups = (per_prompt + GROUP - 1) // GROUP
    tasks = heads * prompts * groups  # in the order of the cells, which are read once
    for thread in prange(threads):  # each allocates once
        query, rotated = np.empty((GROUP, head_size), np.float32), np.empty((1, head_size), np.float32)
        on_text, on_cells = np.empty((GROUP, num_text), np.float32), np.empty((GROUP, seen), np.float32)
        attended, scale = np.empty((GROUP, head_size), np.float32), np.empty(GROUP, np.float32)
        for task in range(thread * tasks // threads, (thread + 1) * tasks // threads):
            of_prompt, start = task // groups, task % groups * GROUP
            head, prompt = of_prompt // prompts, of_prompt % prompts
            count = min(GROUP, per_prompt - start)
            first_row = of_prompt * per_prompt + start
            for member in range(count):
                row, first_cell = prompt * per_prompt + start + member, (first_row + member) * num_cells
                for i in range(0, fetched, line):  # of the next group
                    prefetch(keys, (first_cell + GROUP * num_cells + first) * head_size + i)
                rotate(qkv, row, head * head_size, rotation, 0, query, member)
                rotate(qkv, row, (heads + head) * head_size, rotation, 1, rotated, 0)
                for i in range(head_size):
                    keys[np.uintp(first_cell + cell), i] = narrowed(rotated[0, i], keys)
                rotate(qkv, row, (2 * heads + head) * head_size, rotation, 2, rotated, 0)
                for i in range(head_size):
                    values[np.uintp(first_cell + cell), i] = narrowed(rotated[0, i], values)

            on_text[:], attended[:] = 0, 0
            add_products(query, 0, count, text_keys, of_prompt * head_size * num_text, num_text, on_text)
            for member in range(count):
                first_cell = (first_row + member) * num_cells + first
                for i in range(0, fetched, line):  # of the next group
                    prefetch(values, (first_cell + GROUP * num_cells) * head_size + i)
                for i in range(seen):
                    on_cells[member, i] = dot(query, member, keys, first_cell + i) + widened(bias[i])
                largest = max(largest_of(on_text, member), largest_of(on_cells, member))
                total = exponentials(on_text, member, largest) + exponentials(on_cells, member, largest)
                scale[member] = np.float32(1) / total

            add_products(on_text, 0, count, text_values, of_prompt * num_text * head_size, head_size, attended)
            for member in range(count):
                row, first_cell = prompt * per_prompt + start + member, (first_row + member) * num_cells + first
                add_products(on_cells, member, 1, values, first_cell * head_size, head_size, attended)
                for i in range(head_size):
                    out[row, np.uintp(head * head_size + i)] = narrowed(attended[member, i] * scale[member], out)


@compiled(parallel=True)
def geglu(up, out):
    """up [R, 2 n], values then gates -> out [R, n] = values * gelu(gates), with the error function of Abramowitz and
    Stegun, "Handbook of Mathematical Functions", 7.1.26 (to 1.5e-7)."""
    width = out.shape[1]
    for row in prange(len(up)):
        for i in range(width):
            gate = widened(up[row, np.uintp(width + i)])
            z = abs(gate) * np.float32(math.sqrt(0.5))
            t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * z)
            tail = multiply_add(1.061405429, t, -1.453152027)
            tail = multiply_add(tail, t, 1.421413741)
            tail = multiply_add(tail, t, -0.284496736)
            tail = multiply_add(tail, t, 0.254829592)
            tail = tail * t * exponential(-z * z)  # 1 - erf(z)
            share = np.float32(2) - tail if gate >= 0 else tail
            out[row, i] = narrowed(widened(up[row, i]) * gate * (np.float32(0.5) * share), out)


@compiled(inline="always")
def rotate(qkv, row, channel, rotation, part, out, out_row):
    """Pairs of channels of qkv from [row, channel] on, times the complex numbers rotation [part], to out [out_row]."""
    for pair in range(np.uintp(out.shape[1] // 2)):
        i, j = pair + pair, pair + pair + np.uintp(1)
        x, y = widened(qkv[row, np.uintp(channel) + i]), widened(qkv[row, np.uintp(channel) + j])
        out[out_row, i] = x * rotation[part, i] - y * rotation[part, j]
        out[out_row, j] = x * rotation[part, j] + y * rotation[part, i]


@compiled()
def exponentials(numbers, row, largest):
    """Numbers [row] become exp(number - largest); their total."""
    for i in range(numbers.shape[1]):
        numbers[row, i] = exponential(numbers[row, i] - largest)
    return total_of(numbers, row)


@compiled(inline="always")
def exponential(x):
    """exp of a float32 number <= 0, 0 below -87: 2^n exp(r), the latter by the polynomial of Cephes' expf."""
    bounded = max(x, np.float32(-87))
    n = np.floor(multiply_add(bounded, 1 / math.log(2), 0.5))
    r = multiply_add(n, 2.12194440e-4, multiply_add(n, -0.693359375, bounded))
    p = multiply_add(1.9875691500e-4, r, 1.3981999507e-3)
    p = multiply_add(p, r, 8.3334519073e-3)
    p = multiply_add(p, r, 4.1665795894e-2)
    p = multiply_add(p, r, 1.6666665459e-1)
    p = multiply_add(p, r, 5.0000001201e-1)
    p = multiply_add(p * r, r, r + np.float32(1))
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x >= np.float32(-87) else np.float32(0)
