"""Products with a matrix of weights on the CPU, compiled by numba: float32, and bfloat16 and int8 where the processor
has instructions for their sums.

R rows, K inputs, N outputs, U units of 32 bits of the inputs: U = K in float32, K / 2 in bfloat16, K / 4 in int8.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import prange, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic
from torch import Tensor

from dalle_lean.compiled import compiled

LLVM_VERSION = binding.llvm_version_info[0]
# What numba compiles for, which may be less than this processor has (NUMBA_CPU_NAME, NUMBA_ENABLE_AVX).
TRIPLE, _, NAMED_FEATURES = cpu_target.target_context.codegen().magic_tuple()
FEATURES = NAMED_FEATURES.split(",")
LANES, ROWS = (16, 8) if "+avx512f" in FEATURES else (8, 4)
"""Numbers in a register, and rows multiplied at once: their sums, ROWS times WIDTH, fill the registers."""
WIDTH = 2 * LANES
"""Outputs multiplied at once."""
FUSES = "+fma" in FEATURES or not TRIPLE.startswith(("x86", "i"))
"""Whether a product and a sum are one instruction; otherwise they would be a call of a library."""
MULTIPLIES_BF16 = "+avx512bf16" in FEATURES and LLVM_VERSION >= 20 and not torch.cpu._is_amx_tile_supported()
"""With AMX, oneDNN is faster; earlier versions of LLVM have other types for these products."""
MULTIPLIES_INT8 = ("+avx512vnni" if LANES == 16 else "+avxvnni") in FEATURES
"""Whether four products of bytes and their sum are one instruction."""


class BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


FLOATS = ir.VectorType(ir.FloatType(), LANES)
INTEGERS = ir.VectorType(ir.IntType(32), LANES)
PAIRS = ir.VectorType(BFloat16(), 2 * LANES)


def multiplies(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether `multiply`, or for int8 `multiply_int8`, takes weights of this shape [N, K]."""
    can = {torch.float32: FUSES, torch.bfloat16: MULTIPLIES_BF16, torch.int8: MULTIPLIES_INT8}[dtype]
    return can and shape[0] % WIDTH == 0 and shape[1] % (4 if dtype == torch.int8 else 2) == 0


def units_of(x: Tensor) -> np.ndarray:
    """x [R, K], float32, bfloat16 or int8 -> its units [R, U]."""
    return (x if x.dtype == torch.float32 else x.view(torch.int32)).numpy()


def to_panels(weight: Tensor) -> np.ndarray:
    """Weights [N, K], N a multiple of WIDTH -> units [N / WIDTH, U, WIDTH], read in this order by `multiply`."""
    units = units_of(weight.contiguous())
    return np.ascontiguousarray(units.reshape(-1, WIDTH, units.shape[1]).transpose(0, 2, 1))


def multiply_tile(rows: int) -> Callable[..., None]:
    """A function of (x, row, panels, panel, starts, out): `rows` rows of `multiply`, from `row` on, by one panel.

    numba's own loops would keep the sums in memory; here they stay in registers. A sum begins with its start and is
    added up in the order of the inputs, so that a row comes out the same by any number of rows. What is multiplied
    follows from out: float32; bfloat16 where it is bfloat16's bits; where it is int32, inputs of uint8 and weights of
    int8, whose sums are whole numbers.
    """

    @intrinsic
    def tile(context: Any, x: Any, row: Any, panels: Any, panel: Any, starts: Any, out: Any) -> Any:
        signature = types.void(x, types.intp, panels, types.intp, starts, out)
        units, sums_kind, add_products = {
            types.float32: (FLOATS, FLOATS, fma),
            types.uint16: (INTEGERS, FLOATS, add_pairs),
            types.int32: (INTEGERS, INTEGERS, add_quads),
        }[out.dtype]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def array(argument: int) -> Any:
                return context.make_array(signature.args[argument])(context, builder, arguments[argument])

            def lanes(array: Any, index: Any, kind: Any) -> Any:
                return builder.bitcast(builder.gep(array, [index]), kind.as_pointer())

            x, panels, starts, out = array(0), array(2), array(4), array(5)
            integer = arguments[1].type
            (_, length, _), (_, outputs) = (cgutils.unpack_tuple(builder, part.shape) for part in (panels, out))
            first_output = builder.mul(arguments[3], integer(WIDTH))
            columns = [builder.add(first_output, integer(part)) for part in (0, LANES)]
            own_rows = [builder.add(arguments[1], integer(number)) for number in range(rows)]
            first_sums = [builder.load(lanes(starts.data, column, sums_kind), align=4) for column in columns]
            sums = [[cgutils.alloca_once_value(builder, start) for start in first_sums] for _ in own_rows]
            inputs = [builder.gep(x.data, [builder.mul(number, length)]) for number in own_rows]
            weights = builder.gep(panels.data, [builder.mul(first_output, length)])
            with cgutils.for_range(builder, length) as loop:
                line = builder.mul(loop.index, integer(WIDTH))
                parts = [lanes(weights, builder.add(line, integer(part)), units) for part in (0, LANES)]
                parts = [builder.load(part, align=4) for part in parts]
                for numbers, totals in zip(inputs, sums, strict=True):
                    factor = splat(builder, builder.load(builder.gep(numbers, [loop.index])), LANES)
                    for part, total in zip(parts, totals, strict=True):
                        builder.store(add_products(builder, builder.load(total), factor, part), total)
            for number, totals in zip(own_rows, sums, strict=True):
                start = builder.mul(number, outputs)
                for column, total in zip(columns, totals, strict=True):
                    result = builder.load(total)
                    if add_products is add_pairs:
                        result = builder.fptrunc(result, ir.VectorType(BFloat16(), LANES))
                        result = builder.bitcast(result, ir.VectorType(ir.IntType(16), LANES))
                    target = lanes(out.data, builder.add(start, column), result.type)
                    builder.store(result, target, align=2 if add_products is add_pairs else 4)
            return context.get_dummy_value()

        return signature, generate

    return tile


def splat(builder: Any, number: Any, lanes: int) -> Any:
    """The number in all lanes."""
    kind, integers = ir.VectorType(number.type, lanes), ir.VectorType(ir.IntType(32), lanes)
    anything = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(anything, number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, anything, integers([0] * lanes))


def call(builder: Any, name: str, kind: Any, *values: Any) -> Any:
    """A call of LLVM's own function of this name, whose result is of this kind."""
    function_type = ir.FunctionType(kind, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), values)


def fma(builder: Any, total: Any, factor: Any, weights: Any) -> Any:
    """total + factor * weights, in float32."""
    return call(builder, f"llvm.fma.v{LANES}f32", FLOATS, factor, weights, total)


def add_pairs(builder: Any, total: Any, factor: Any, weights: Any) -> Any:
    """total + the products of pairs in bfloat16."""
    factor, weights = (builder.bitcast(units, PAIRS) for units in (factor, weights))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, factor, weights)


def add_quads(builder: Any, total: Any, factor: Any, weights: Any) -> Any:
    """total + the products of four uint8 of factor with four int8 of weights."""
    return call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", INTEGERS, total, factor, weights)


several_rows, one_row = multiply_tile(ROWS), multiply_tile(1)


@compiled(parallel=True)
def multiply(x, panels, starts, out):
    """out [R, N] = x, units [R, U], times the weights of panels, units [N / WIDTH, U, WIDTH], plus starts [N].

    out is float32, or bfloat16's bits, uint16; starts are float32.
    """
    whole = len(x) // ROWS * ROWS
    for panel in prange(len(panels)):
        for row in range(0, whole, ROWS):
            several_rows(x, row, panels, panel, starts, out)
        for row in range(whole, len(x)):
            one_row(x, row, panels, panel, starts, out)


MIDDLE = 128
"""The byte that stands for 0 in rounded inputs."""
MIDDLE_ROUNDED = np.float32((3 << 22) + MIDDLE)
"""Added to a small float32, it rounds it to a whole number, which plus MIDDLE then stands in the last bits."""


def to_int8_panels(weight: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 weights [N, K] -> panels, starts and steps for `multiply_int8`."""
    steps = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
    rounded = (weight / steps[:, None]).round().to(torch.int8)
    starts = -MIDDLE * rounded.sum(dim=1, dtype=torch.int32)
    return to_panels(rounded), starts.numpy(), steps.numpy()


@compiled()
def round_rows(x, rounded, steps):
    """x [R, K] float32 -> rounded [R, K] uint8, with steps [R]: a row's number is its step times (byte - MIDDLE)."""
    bits = x.view(np.uint32)
    for row in range(len(x)):
        largest = np.uint32(0)  # as bits, of which many are compared at once
        for i in range(x.shape[1]):
            largest = max(largest, np.uint32(bits[row, i] & np.uint32(0x7FFFFFFF)))
        steps[row] = np.uint32(largest).view(np.float32) / np.float32(127)
        inverse = np.float32(1) / max(steps[row], np.float32(1e-30))
        for i in range(x.shape[1]):
            rounded[row, i] = np.uint8(np.float32(x[row, i] * inverse + MIDDLE_ROUNDED).view(np.uint32))


@compiled(parallel=True)
def multiply_int8(x, panels, starts, steps, bias, out):
    """out [R, N] = x [R, K], rounded to 8 bits with a step for each row, times int8 weights, plus bias [N], in float32.

    panels [N / WIDTH, U, WIDTH]; starts [N] int32: -MIDDLE times the sum of an output's weights; steps [N]: of weights.
    """
    rounded, row_steps = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
    round_rows(x, rounded, row_steps)
    units, sums, whole = rounded.view(np.int32), out.view(np.int32), len(x) // ROWS * ROWS
    for panel in prange(len(panels)):
        for row in range(0, whole, ROWS):
            several_rows(units, row, panels, panel, starts, sums)
        for row in range(whole, len(x)):
            one_row(units, row, panels, panel, starts, sums)
        first = np.uintp(panel) * np.uintp(WIDTH)
        for row in range(len(x)):
            for i in range(first, first + np.uintp(WIDTH)):
                out[row, i] = sums[row, i] * (row_steps[row] * steps[i]) + bias[i]
