"""What a decoding step does between its products with weights, compiled by numba for the CPU.

Each picture's numbers are summed in the same order whatever the batch and the number of threads. bfloat16 numbers come
and go as their bits, uint16.

R pictures, D hidden size, H heads, d head size, N prompts, r rows of a prompt, P text positions, n cells read.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from dalle_lean.compiled import compiled
from inference.sampling.matmul_kernel import LANES, call  # numba's cache of this file does not see them change

GROUP = 4
"""Pictures of a prompt that attend together, so that its keys and values are read once for them."""
CACHE_LINE_BYTES = 64
MOST_FETCHED = 4096
"""Numbers of a picture's values that are fetched ahead, at most: more would push one another out of the cache."""
REGISTERS = 4 if LANES == 16 else 2
"""Registers of sums of each of these pictures."""
TILES = (LANES, REGISTERS), (LANES, 1), (1, 1)
"""Numbers in a register and registers that are multiplied at once, as long as so many columns are left."""


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
    # Whole registers are scored; scores after the last cell seen are dropped.
    seen, scored = len(bias), min((len(bias) + LANES - 1) // LANES * LANES, block_cells - first % block_cells)
    groups = (per_prompt + GROUP - 1) // GROUP
    for task in prange(heads * prompts * groups):  # in the order of the cells, which are read once
        of_prompt, start = task // groups, task % groups * GROUP
        head, prompt = of_prompt // prompts, of_prompt % prompts
        count = min(GROUP, per_prompt - start)
        # They arrive while queries are rotated and meet the text. Of keys, the first line of each channel.
        for member in range(count):
            of_row = of_prompt * per_prompt + start + member
            first_key = (of_row * blocks + block) * head_size * block_cells + first % block_cells
            for i in range(head_size):
                prefetch(keys, first_key + i * block_cells)
            first_value = (of_row * num_cells + first) * head_size
            for i in range(0, min(seen * head_size, MOST_FETCHED), CACHE_LINE_BYTES // values.itemsize):
                prefetch(values, first_value + i)
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

        on_text, scores = np.zeros((GROUP, num_text), np.float32), np.zeros((GROUP, scored), np.float32)
        on_cells, scale = np.empty((GROUP, seen), np.float32), np.empty(GROUP, np.float32)
        add_products(query, 0, count, text_keys, of_prompt * head_size * num_text, num_text, on_text)
        for member in range(count):
            of_block = ((of_prompt * per_prompt + start + member) * blocks + block) * head_size
            add_products(query, member, 1, keys, of_block * block_cells + first % block_cells, block_cells, scores)
            for i in range(seen):
                on_cells[member, i] = scores[member, i] + widened(bias[i])
            largest = max(maximum(on_text[member]), maximum(on_cells[member]))
            total = exponentials(on_text[member], largest) + exponentials(on_cells[member], largest)
            scale[member] = np.float32(1) / total

        attended = np.zeros((GROUP, head_size), np.float32)
        add_products(on_text, 0, count, text_values, of_prompt * num_text * head_size, head_size, attended)
        for member in range(count):
            row, of_row = prompt * per_prompt + start + member, of_prompt * per_prompt + start + member
            add_products(on_cells, member, 1, values, (of_row * num_cells + first) * head_size, head_size, attended)
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
    for pair in range(np.uintp(len(out) // 2)):
        i, j = pair + pair, pair + pair + np.uintp(1)
        x, y = widened(qkv[row, np.uintp(channel) + i]), widened(qkv[row, np.uintp(channel) + j])
        out[i] = x * rotation[part, i] - y * rotation[part, j]
        out[j] = x * rotation[part, j] + y * rotation[part, i]


def _prefetch(context: Any, matrix: Any, number: Any) -> Any:
    """Have the cache line of a number of the matrix, counted from its first, read before it is used."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        to_read, keep, data_cache = (ir.IntType(32)(setting) for setting in (0, 3, 1))
        call(builder, "llvm.prefetch.p0", ir.VoidType(), address, to_read, keep, data_cache)
        return context.get_dummy_value()

    return types.void(matrix, types.intp), generate


prefetch: Callable[..., None] = intrinsic(_prefetch)


def product_tile(rows: int, lanes: int, registers: int) -> Callable[..., None]:
    """A function of (x, row, matrix, first, stride, out, column): `rows` rows of `add_products`, from `row` on, and
    lanes * registers columns, from `column` on. numba's own loops would keep the sums in memory, not in registers."""

    @intrinsic
    def tile(context: Any, x: Any, row: Any, matrix: Any, first: Any, stride: Any, out: Any, column: Any) -> Any:
        signature = types.void(x, types.intp, matrix, types.intp, types.intp, out, types.intp)
        assert x.layout == matrix.layout == out.layout == "C"
        floats, integers, halves = (
            ir.VectorType(kind, lanes) for kind in (ir.FloatType(), ir.IntType(32), ir.IntType(16))
        )
        stored = floats if matrix.dtype == types.float32 else halves  # bfloat16's bits are the upper half of float32's

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def lanes_of(data: Any, index: Any, kind: Any) -> Any:
                return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())

            x, matrix, out = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 2, 5))
            (row, first, stride, column), integer = (arguments[i] for i in (1, 3, 4, 6)), arguments[1].type
            (_, length), (_, width) = (cgutils.unpack_tuple(builder, array.shape) for array in (x, out))
            parts = [integer(part * lanes) for part in range(registers)]
            inputs, targets, sums = [], [], []
            for number in range(rows):
                own_row = builder.add(row, integer(number))
                inputs.append(builder.gep(x.data, [builder.mul(own_row, length)]))
                start = builder.add(builder.mul(own_row, width), column)
                targets.append([lanes_of(out.data, builder.add(start, part), floats) for part in parts])
                starts = [builder.load(target, align=4) for target in targets[-1]]
                sums.append([cgutils.alloca_once_value(builder, start) for start in starts])
            begin, anything = builder.add(first, column), ir.Constant(floats, ir.Undefined)
            with cgutils.for_range(builder, length) as loop:
                line = builder.add(begin, builder.mul(loop.index, stride))
                factors = [lanes_of(matrix.data, builder.add(line, part), stored) for part in parts]
                factors = [builder.load(factor, align=2 if stored is halves else 4) for factor in factors]
                if stored is halves:
                    factors = [builder.shl(builder.zext(half, integers), integers([16] * lanes)) for half in factors]
                    factors = [builder.bitcast(bits, floats) for bits in factors]
                for numbers, totals in zip(inputs, sums, strict=True):
                    number = builder.load(builder.gep(numbers, [loop.index]))
                    number = builder.insert_element(anything, number, ir.IntType(32)(0))
                    number = builder.shuffle_vector(number, anything, integers([0] * lanes))
                    for factor, total in zip(factors, totals, strict=True):
                        added = number, factor, builder.load(total)
                        builder.store(call(builder, f"llvm.fmuladd.v{lanes}f32", floats, *added), total)
            for line_of_targets, totals in zip(targets, sums, strict=True):
                for target, total in zip(line_of_targets, totals, strict=True):
                    builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        return signature, generate

    return tile


group_wide, group_narrow, group_single = (product_tile(GROUP, *shape) for shape in TILES)
wide, narrow, single = (product_tile(1, *shape) for shape in TILES)


@compiled()
def add_products(x, row, count, matrix, first, stride, out):
    """out [GROUP, n] += x [GROUP, m], their `count` rows from `row` on, times the matrix [m, n] whose lines begin
    `stride` numbers apart in `matrix`, from number `first` on.

    The whole GROUP reads the matrix once; a sum is added up in the order of the lines by any number of rows.
    """
    width = out.shape[1]
    in_registers = width // LANES * LANES
    in_wide = width // (LANES * REGISTERS) * (LANES * REGISTERS)
    for column in range(0, in_wide, LANES * REGISTERS):
        if count == GROUP:
            group_wide(x, row, matrix, first, stride, out, column)
        else:
            for i in range(row, row + count):
                wide(x, i, matrix, first, stride, out, column)
    for column in range(in_wide, in_registers, LANES):
        if count == GROUP:
            group_narrow(x, row, matrix, first, stride, out, column)
        else:
            for i in range(row, row + count):
                narrow(x, i, matrix, first, stride, out, column)
    for column in range(in_registers, width):
        if count == GROUP:
            group_single(x, row, matrix, first, stride, out, column)
        else:
            for i in range(row, row + count):
                single(x, i, matrix, first, stride, out, column)


@compiled()
def maximum(numbers):
    """The largest of numbers [n], n > 0, in four independent parts."""
    a = b = c = d = numbers[0]
    whole = len(numbers) // 4 * 4
    for i in range(0, whole, 4):
        a = max(a, numbers[i])
        b = max(b, numbers[i + 1])
        c = max(c, numbers[i + 2])
        d = max(d, numbers[i + 3])
    for i in range(whole, len(numbers)):
        a = max(a, numbers[i])
    return max(max(a, b), max(c, d))


@compiled()
def exponentials(numbers, largest):
    """Numbers [n] become exp(number - largest); their total."""
    for i in range(len(numbers)):
        numbers[i] = exponential(numbers[i] - largest)
    return total_of(numbers)


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
