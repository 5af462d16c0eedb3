"""Products with a matrix of weights on the CPU, compiled by numba: float32, or bfloat16 where AVX-512 multiplies it.

R rows, K inputs, N outputs, U units of 32 bits of the inputs: U = K in float32, K / 2 in bfloat16.
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


class BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


FLOATS = ir.VectorType(ir.FloatType(), LANES)
PAIRS = ir.VectorType(BFloat16(), 2 * LANES)


def multiplies(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Whether `multiply` takes weights of this shape [N, K], float32 or bfloat16."""
    fits = shape[0] % WIDTH == 0 and shape[1] % 2 == 0
    return fits and FUSES and (dtype == torch.float32 or MULTIPLIES_BF16)


def units_of(x: Tensor) -> np.ndarray:
    """x [R, K], float32 or bfloat16 -> its units [R, U]."""
    return (x.view(torch.int32) if x.dtype == torch.bfloat16 else x).numpy()


def to_panels(weight: Tensor) -> np.ndarray:
    """Weights [N, K], N a multiple of WIDTH -> units [N / WIDTH, U, WIDTH], read in this order by `multiply`."""
    units = units_of(weight.contiguous())
    return np.ascontiguousarray(units.reshape(-1, WIDTH, units.shape[1]).transpose(0, 2, 1))


def multiply_tile(rows: int) -> Callable[..., None]:
    """A function of (x, row, panels, panel, bias, out): `rows` rows of `multiply`, from `row` on, by one panel.

    numba's own loops would keep the sums in memory; here they stay in registers. Each starts from the bias and is added
    up in the order of the inputs, so that a row comes out the same by any number of rows.
    """

    @intrinsic
    def tile(context: Any, x: Any, row: Any, panels: Any, panel: Any, bias: Any, out: Any) -> Any:
        signature = types.void(x, types.intp, panels, types.intp, bias, out)
        in_pairs = x.dtype == types.int32
        units = ir.VectorType(ir.IntType(32), LANES) if in_pairs else FLOATS

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def array(argument: int) -> Any:
                return context.make_array(signature.args[argument])(context, builder, arguments[argument])

            def lanes(array: Any, index: Any, kind: Any) -> Any:
                return builder.bitcast(builder.gep(array, [index]), kind.as_pointer())

            def function(name: str, *kinds: Any) -> Any:
                return cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOATS, kinds), name)

            def add_product(total: Any, factor: Any, weights: Any) -> Any:
                if not in_pairs:
                    multiply_add = function(f"llvm.fma.v{LANES}f32", FLOATS, FLOATS, FLOATS)
                    return builder.call(multiply_add, [factor, weights, total])
                dot = function("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, PAIRS, PAIRS)
                return builder.call(dot, [total, builder.bitcast(factor, PAIRS), builder.bitcast(weights, PAIRS)])

            x, panels, bias, out = array(0), array(2), array(4), array(5)
            integer = arguments[1].type
            (_, length, _), (_, outputs) = (cgutils.unpack_tuple(builder, part.shape) for part in (panels, out))
            first_output = builder.mul(arguments[3], integer(WIDTH))
            columns = [builder.add(first_output, integer(part)) for part in (0, LANES)]
            own_rows = [builder.add(arguments[1], integer(number)) for number in range(rows)]
            biases = [builder.load(lanes(bias.data, column, FLOATS), align=4) for column in columns]
            sums = [[cgutils.alloca_once_value(builder, start) for start in biases] for _ in own_rows]
            inputs = [builder.gep(x.data, [builder.mul(number, length)]) for number in own_rows]
            weights = builder.gep(panels.data, [builder.mul(first_output, length)])
            anything, first_lane = ir.Constant(units, ir.Undefined), ir.Constant(ir.IntType(32), 0)
            in_all_lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
            with cgutils.for_range(builder, length) as loop:
                line = builder.mul(loop.index, integer(WIDTH))
                parts = [lanes(weights, builder.add(line, integer(part)), units) for part in (0, LANES)]
                parts = [builder.load(part, align=4) for part in parts]
                for numbers, totals in zip(inputs, sums, strict=True):
                    number = builder.load(builder.gep(numbers, [loop.index]))
                    factor = builder.insert_element(anything, number, first_lane)
                    factor = builder.shuffle_vector(factor, anything, in_all_lanes)
                    for part, total in zip(parts, totals, strict=True):
                        builder.store(add_product(builder.load(total), factor, part), total)
            for number, totals in zip(own_rows, sums, strict=True):
                start = builder.mul(number, outputs)
                for column, total in zip(columns, totals, strict=True):
                    result = builder.load(total)
                    if in_pairs:
                        result = builder.fptrunc(result, ir.VectorType(BFloat16(), LANES))
                        result = builder.bitcast(result, ir.VectorType(ir.IntType(16), LANES))
                    target = lanes(out.data, builder.add(start, column), result.type)
                    builder.store(result, target, align=2 if in_pairs else 4)
            return context.get_dummy_value()

        return signature, generate

    return tile


several_rows, one_row = multiply_tile(ROWS), multiply_tile(1)


@compiled(parallel=True)
def multiply(x, panels, bias, out):
    """out [R, N] = x, units [R, U], times the weights of panels, units [N / WIDTH, U, WIDTH], plus float32 bias [N].

    out is float32, or bfloat16's bits, uint16.
    """
    whole = len(x) // ROWS * ROWS
    for panel in prange(len(panels)):
        for row in range(0, whole, ROWS):
            several_rows(x, row, panels, panel, bias, out)
        for row in range(whole, len(x)):
            one_row(x, row, panels, panel, bias, out)
