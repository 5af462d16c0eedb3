"""What a decoding step does between its products with weights, compiled by numba for the CPU.

Each picture's numbers are summed in the same order whatever the batch and the number of threads. bfloat16 numbers come
and go as their bits, uint16.

R pictures, D hidden size, H heads, d head size, N prompts, r rows of a prompt, P text positions, n cells read.
"""

import math
import os
from typing import Any

import numpy as np
from numba import config, prange, set_num_threads, threading_layer, types
from numba.extending import overload

from dalle_lean.compiled import compiled
from inference.sampling import draw_kernel, matmul_kernel

if "NUMBA_THREADING_LAYER" not in os.environ:
    config.THREADING_LAYER = "threadsafe"  # type: ignore[attr-defined]

GROUP = 4
"""Pictures of a prompt that attend together, so that its keys and values are read once for them."""


def prepare(dtype: Any) -> None:
    """Start numba's threads and compile what a step with numbers of this dtype needs, or load it from the disk.

    int8: what float32 needs, and products of int8. ValueError if numba's threads cannot serve several of this program's
    threads at once.
    """
    use_threads(1)
    if dtype == np.int8:
        if matmul_kernel.MULTIPLIES_INT8:
            panels, empty = np.zeros((0, 1, 1), np.int32), np.zeros(0, np.float32)
            starts = np.zeros(0, np.int32)
            matmul_kernel.multiply_int8(np.zeros((0, 4), np.float32), panels, starts, empty, empty, empty[:, None])
        dtype = np.dtype(np.float32)
    number, row, column = (np.zeros(shape, dtype) for shape in (1, (1, 2), (2, 1)))
    stream, pair, inputs = (np.zeros(shape, np.float32) for shape in ((1, 2), 2, (1, 1, 1, 2)))
    geglu(row, np.zeros((1, 1), dtype))
    for delta in (row, stream):  # the latter if the output is normalised
        add_and_prepare(stream, delta, pair, pair, pair, np.float32(1), inputs, 0, 0, row)
    words, code, setting = np.zeros((2, 1), np.uint64), np.zeros(1, np.int64), np.zeros(1, np.float32)
    draw_kernel.draw(stream, np.float32(-1), setting, code, setting, setting, words, words, 0, code)
    rotation = np.zeros((3, 2), np.float32)
    attend(np.zeros((1, 6), dtype), rotation, column, row, number, 0, 0, column, row, 1, row)
    if dtype == np.float32 or matmul_kernel.MULTIPLIES_BF16:
        units = np.zeros((0, 1), np.float32 if dtype == np.float32 else np.int32)
        matmul_kernel.multiply(units, units[None], setting, row)
    if threading_layer() == "workqueue":
        raise ValueError("it found neither OpenMP nor TBB")


def use_threads(count: int) -> None:
    """Run the kernels on this many threads, if there are as many."""
    set_num_threads(min(count, config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]


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
    hidden, half = stream.shape[1], inputs.shape[3]
    branch, column, left = np.uintp(branch), np.uintp(column), np.uintp(max(column - 1, 0))
    for row in prange(len(stream)):
        x = np.empty(hidden, np.float32)
        for i in range(hidden):
            x[i] = stream[row, i] + widened(delta[row, i]) * scale[i]
            stream[row, i] = x[i]
        mean = total_of(x) / np.float32(hidden)
        square = np.empty(hidden, np.float32)
        for i in range(hidden):
            x[i] -= mean
            square[i] = x[i] * x[i]
        inverse = np.float32(1) / np.sqrt(total_of(square) / np.float32(hidden) + eps)
        for i in range(hidden):
            x[i] = x[i] * inverse * weight[i] + bias[i]
        for i in range(half // 2):
            out[row, i] = narrowed(inputs[branch, column, row, i], out)
        if column > 0:
            for i in range(half // 2, half):
                out[row, i] = narrowed(inputs[branch, left, row, i], out)
        else:
            for i in range(half // 2, half):
                out[row, i] = 0
        for i in range(half):
            inputs[branch, column, row, i] = x[i]
        for i in range(half, hidden):
            out[row, i] = narrowed(x[i], out)


@compiled(parallel=True)
def attend(qkv, rotation, keys, values, bias, first, cell, text_keys, text_values, prompts, out):
    """Rotate qkv [R, 3 H d], write keys and values to their cell, and attend to the prompt and the cells read.

    rotation: [3, d], pairs of cosine and sine for queries (times the scores' scale), keys and values.
    keys, values: [H N r blocks d, cells of a block] and [H N r cells, d]; the cells first..first + n, of one block, are
    read, with `bias` [n].
    text_keys, text_values: [H N d, P] and [H N P, d].
    prompts: N.
    out: [R, H d].
    """
    head_size, block_cells, num_text = rotation.shape[1], keys.shape[1], text_keys.shape[1]
    heads, per_prompt = out.shape[1] // head_size, len(qkv) // prompts
    blocks = len(keys) // (heads * len(qkv) * head_size)
    num_cells, block = blocks * block_cells, cell // block_cells
    groups = (per_prompt + GROUP - 1) // GROUP
    for task in prange(heads * prompts * groups):  # in the order of the cells, which are read once
        of_prompt, start = task // groups, task % groups * GROUP
        head, prompt = of_prompt // prompts, of_prompt % prompts
        count = min(GROUP, per_prompt - start)
        query, rotated = np.empty((GROUP, head_size), np.float32), np.empty(head_size, np.float32)
        for member in range(count):
            row, of_row = prompt * per_prompt + start + member, of_prompt * per_prompt + start + member
            rotate(qkv, row, head * head_size, rotation, 0, query[member])
            rotate(qkv, row, (heads + head) * head_size, rotation, 1, rotated)
            of_block = (of_row * blocks + block) * head_size
            for i in range(head_size):
                keys[np.uintp(of_block + i), np.uintp(cell % block_cells)] = narrowed(rotated[i], keys)
            rotate(qkv, row, (2 * heads + head) * head_size, rotation, 2, rotated)
            for i in range(head_size):
                values[np.uintp(of_row * num_cells + cell), i] = narrowed(rotated[i], values)

        on_text, on_cells = np.zeros((GROUP, num_text), np.float32), np.empty((GROUP, len(bias)), np.float32)
        scale = np.empty(GROUP, np.float32)
        add_products(query, count, text_keys, of_prompt * head_size, on_text)
        for member in range(count):
            for i in range(len(bias)):
                on_cells[member, i] = widened(bias[i])
            of_block = ((of_prompt * per_prompt + start + member) * blocks + block) * head_size
            add_product(query[member], keys, of_block, first % block_cells, on_cells[member])
            largest = max(maximum(on_text[member]), maximum(on_cells[member]))
            for i in range(num_text):
                on_text[member, i] = exponential(on_text[member, i] - largest)
            for i in range(len(bias)):
                on_cells[member, i] = exponential(on_cells[member, i] - largest)
            scale[member] = np.float32(1) / (total_of(on_text[member]) + total_of(on_cells[member]))

        attended = np.zeros((GROUP, head_size), np.float32)
        add_products(on_text, count, text_values, of_prompt * num_text, attended)
        for member in range(count):
            row, of_row = prompt * per_prompt + start + member, of_prompt * per_prompt + start + member
            add_product(on_cells[member], values, of_row * num_cells + first, 0, attended[member])
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
            tail = np.float32(1.061405429)
            tail = tail * t - np.float32(1.453152027)
            tail = tail * t + np.float32(1.421413741)
            tail = tail * t - np.float32(0.284496736)
            tail = tail * t + np.float32(0.254829592)
            tail = tail * t * exponential(-z * z)  # 1 - erf(z)
            share = np.float32(2) - tail if gate >= 0 else tail
            out[row, i] = narrowed(widened(up[row, i]) * gate * (np.float32(0.5) * share), out)


@compiled(inline="always")
def rotate(qkv, row, channel, rotation, part, out):
    """out [d] = the pairs of channels of qkv from [row, channel] on, times the complex numbers rotation [part]."""
    for pair in range(len(out) // 2):
        i, j = np.uintp(2 * pair), np.uintp(2 * pair + 1)
        x, y = widened(qkv[row, np.uintp(channel) + i]), widened(qkv[row, np.uintp(channel) + j])
        out[i] = x * rotation[part, i] - y * rotation[part, j]
        out[j] = x * rotation[part, j] + y * rotation[part, i]


@compiled()
def add_product(vector, matrix, row, column, out):
    """out [n] += vector [m] times the matrix [m, n] whose first number is at [row, column] of `matrix`."""
    whole = len(vector) // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, d = vector[i], vector[i + 1], vector[i + 2], vector[i + 3]
        for j in range(len(out)):
            x = np.uintp(column + j)
            upper = a * widened(matrix[row + i, x]) + b * widened(matrix[row + i + 1, x])
            out[j] += upper + (c * widened(matrix[row + i + 2, x]) + d * widened(matrix[row + i + 3, x]))
    for i in range(whole, len(vector)):
        for j in range(len(out)):
            out[j] += vector[i] * widened(matrix[row + i, np.uintp(column + j)])


@compiled()
def add_products(vectors, count, matrix, row, out):
    """`add_product` of each of the first `count` vectors [GROUP, m] with one matrix [m, n]; out is [GROUP, n].

    A whole group reads the matrix once; each vector's products are added in the order of `add_product`.
    """
    if count < GROUP:
        for member in range(count):
            add_product(vectors[member], matrix, row, 0, out[member])
        return
    u, v, w, z = vectors[0], vectors[1], vectors[2], vectors[3]
    out_u, out_v, out_w, out_z = out[0], out[1], out[2], out[3]
    whole = len(u) // 4 * 4
    for i in range(0, whole, 4):
        for j in range(out.shape[1]):
            x = np.uintp(j)
            a, b = widened(matrix[row + i, x]), widened(matrix[row + i + 1, x])
            c, d = widened(matrix[row + i + 2, x]), widened(matrix[row + i + 3, x])
            out_u[x] += (u[i] * a + u[i + 1] * b) + (u[i + 2] * c + u[i + 3] * d)
            out_v[x] += (v[i] * a + v[i + 1] * b) + (v[i + 2] * c + v[i + 3] * d)
            out_w[x] += (w[i] * a + w[i + 1] * b) + (w[i + 2] * c + w[i + 3] * d)
            out_z[x] += (z[i] * a + z[i + 1] * b) + (z[i + 2] * c + z[i + 3] * d)
    for i in range(whole, len(u)):
        for j in range(out.shape[1]):
            x = np.uintp(j)
            a = widened(matrix[row + i, x])
            out_u[x] += u[i] * a
            out_v[x] += v[i] * a
            out_w[x] += w[i] * a
            out_z[x] += z[i] * a


@compiled()
def maximum(numbers):
    """The largest of numbers [n]."""
    largest = numbers[0]
    for i in range(len(numbers)):
        largest = max(largest, numbers[i])
    return largest


@compiled()
def total_of(numbers):
    """The sum of float32 numbers [n], in eight independent parts."""
    a = b = c = d = e = f = g = h = np.float32(0)
    whole = len(numbers) // 8 * 8
    for i in range(0, whole, 8):
        a += numbers[i]
        b += numbers[i + 1]
        c += numbers[i + 2]
        d += numbers[i + 3]
        e += numbers[i + 4]
        f += numbers[i + 5]
        g += numbers[i + 6]
        h += numbers[i + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(whole, len(numbers)):
        total += numbers[i]
    return total


@compiled(inline="always")
def exponential(x):
    """exp of a float32 number <= 0, 0 below -87: 2^n exp(r), the latter by the polynomial of Cephes' expf."""
    bounded = max(x, np.float32(-87))
    n = np.floor(bounded * np.float32(1 / math.log(2)) + np.float32(0.5))
    r = bounded - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x >= np.float32(-87) else np.float32(0)
