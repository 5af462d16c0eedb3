"""What numba's own loops would do one number after another, or with sums in memory: products, totals and maxima in
registers, and reading ahead."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from dalle_lean.compiled import compiled
from inference.sampling.matmul_kernel import LANES, call, splat

GROUP = 4
"""Rows that are multiplied together, so that a matrix is read once for them."""
REGISTERS = 4 if LANES == 16 else 2
"""Registers of sums of each of these rows."""
TILES = (LANES, REGISTERS, 1), (LANES, 1, 4), (1, 1, 4)
"""Numbers in a register, registers of a row, and partial sums of each sum: the first that fits the columns left is
used. Where sums are few, each has several, for an addition waits for the one before it to the same sum."""


def _prefetch(context: Any, matrix: Any, number: Any) -> Any:
    """Have the cache line of a number of the matrix, counted from its first, read before it is used. A line outside
    the matrix does no harm."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        to_read, keep, data_cache = (ir.IntType(32)(setting) for setting in (0, 3, 1))
        call(builder, "llvm.prefetch.p0", ir.VoidType(), address, to_read, keep, data_cache)
        return context.get_dummy_value()

    return types.void(matrix, types.intp), generate


prefetch: Callable[..., None] = intrinsic(_prefetch)


def _multiply_add(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, as one instruction where there is one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return call(builder, "llvm.fmuladd.f32", ir.FloatType(), *arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


multiply_add: Callable[..., float] = intrinsic(_multiply_add)


def load(builder: Any, data: Any, index: Any, lanes: int) -> Any:
    """`lanes` numbers of float32, or bfloat16's bits, from an index on, as float32."""
    stored = data.type.pointee
    numbers = builder.bitcast(builder.gep(data, [index]), ir.VectorType(stored, lanes).as_pointer())
    if stored == ir.FloatType():
        return builder.load(numbers, align=4)
    integers = ir.VectorType(ir.IntType(32), lanes)  # of float32's bits, bfloat16's are the upper half
    bits = builder.shl(builder.zext(builder.load(numbers, align=2), integers), integers([16] * lanes))
    return builder.bitcast(bits, ir.VectorType(ir.FloatType(), lanes))


def product_tile(rows: int, lanes: int, registers: int, partial_sums: int) -> Callable[..., None]:
    """A function of (x, row, matrix, first, stride, out, column): `rows` rows of `add_products`, from `row` on, and
    lanes * registers columns, from `column` on."""

    @intrinsic
    def tile(context: Any, x: Any, row: Any, matrix: Any, first: Any, stride: Any, out: Any, column: Any) -> Any:
        signature = types.void(x, types.intp, matrix, types.intp, types.intp, out, types.intp)
        assert x.layout == matrix.layout == out.layout == "C"
        floats = ir.VectorType(ir.FloatType(), lanes)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, matrix, out = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 2, 5))
            (row, first, stride, column), integer = (arguments[i] for i in (1, 3, 4, 6)), arguments[1].type
            (_, length), (_, width) = (cgutils.unpack_tuple(builder, array.shape) for array in (x, out))
            parts = [integer(part * lanes) for part in range(registers)]
            inputs, targets, sums = [], [], []
            for number in range(rows):
                own_row = builder.add(row, integer(number))
                inputs.append(builder.gep(x.data, [builder.mul(own_row, length)]))
                start = builder.add(builder.mul(own_row, width), column)
                indices = [builder.add(start, part) for part in parts]
                targets.append([builder.bitcast(builder.gep(out.data, [i]), floats.as_pointer()) for i in indices])
                starts = [builder.load(target, align=4) for target in targets[-1]]
                sums.append([[cgutils.alloca_once_value(builder, start) for start in starts]])
                for _ in range(1, partial_sums):
                    sums[-1].append([cgutils.alloca_once_value(builder, floats([0.0] * lanes)) for _ in parts])
            begin = builder.add(first, column)

            def add_products_of(index: Any, which: int) -> None:
                """Of number `index` of each row of x and the matrix's row of this number, to a partial sum."""
                start = builder.add(begin, builder.mul(index, stride))
                factors = [load(builder, matrix.data, builder.add(start, part), lanes) for part in parts]
                for numbers, totals in zip(inputs, sums, strict=True):
                    number = splat(builder, builder.load(builder.gep(numbers, [index])), lanes)
                    for factor, total in zip(factors, totals[which], strict=True):
                        added = number, factor, builder.load(total)
                        builder.store(call(builder, f"llvm.fmuladd.v{lanes}f32", floats, *added), total)

            whole = builder.udiv(length, integer(partial_sums))
            with cgutils.for_range(builder, whole) as loop:
                first_index = builder.mul(loop.index, integer(partial_sums))
                for which in range(partial_sums):
                    add_products_of(builder.add(first_index, integer(which)), which)
            rest = cgutils.for_range_slice(builder, builder.mul(whole, integer(partial_sums)), length, integer(1))
            with rest as (index, _):
                add_products_of(index, 0)
            for row_targets, totals in zip(targets, sums, strict=True):
                for part, target in enumerate(row_targets):
                    to_add = [builder.load(total[part]) for total in totals]
                    while len(to_add) > 1:
                        to_add = [builder.fadd(*to_add[i : i + 2]) for i in range(0, len(to_add), 2)]
                    builder.store(to_add[0], target, align=4)
            return context.get_dummy_value()

        return signature, generate

    return tile


group_wide, group_narrow, group_single = (product_tile(GROUP, *shape) for shape in TILES)
wide, narrow, single = (product_tile(1, *shape) for shape in TILES)


@compiled()
def add_products(x, row, count, matrix, first, stride, out):
    """out [GROUP, n] += x [GROUP, m], their `count` rows from `row` on, times the matrix [m, n] whose rows begin
    `stride` numbers apart in `matrix`, from number `first` on.

    The whole GROUP (from row 0 on) reads the matrix once; a sum is added up in the same order by any number of rows.
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


def reduced(builder: Any, width: Any, first: float, combine: Callable[..., Any], numbers_at: Callable[..., Any]) -> Any:
    """A float32, `first` combined with all of `width` numbers: numbers_at(index, lanes) are `lanes` of them."""
    integer, int32 = width.type, ir.IntType(32)
    total = cgutils.alloca_once_value(builder, ir.VectorType(ir.FloatType(), LANES)([first] * LANES))
    whole = builder.udiv(width, integer(LANES))
    with cgutils.for_range(builder, whole) as loop:
        numbers = numbers_at(builder.mul(loop.index, integer(LANES)), LANES)
        builder.store(combine(builder, builder.load(total), numbers), total)
    lanes, result = LANES, builder.load(total)
    while lanes > 1:
        lanes //= 2
        kind = ir.VectorType(int32, lanes)
        halves = kind(list(range(lanes))), kind(list(range(lanes, 2 * lanes)))
        result = combine(builder, *(builder.shuffle_vector(result, result, half) for half in halves))
    total = cgutils.alloca_once_value(builder, builder.extract_element(result, int32(0)))
    with cgutils.for_range_slice(builder, builder.mul(whole, integer(LANES)), width, integer(1)) as (index, _):
        number = builder.extract_element(numbers_at(index, 1), int32(0))
        builder.store(combine(builder, builder.load(total), number), total)
    return builder.load(total)


def add(builder: Any, a: Any, b: Any) -> Any:
    """Their sum."""
    return builder.fadd(a, b)


def larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def row_of(context: Any, builder: Any, kind: Any, matrix: Any, row: Any) -> tuple[Any, Any]:
    """Where a row of a matrix of this type begins, and its width."""
    assert kind.layout == "C"
    matrix = context.make_array(kind)(context, builder, matrix)
    _, width = cgutils.unpack_tuple(builder, matrix.shape)
    return builder.gep(matrix.data, [builder.mul(row, width)]), width


def row_reduction(first: float, combine: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (matrix, row): all numbers of a row of the float32 matrix combined with one another and `first`."""

    @intrinsic
    def reduce(context: Any, matrix: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            numbers, width = row_of(context, builder, matrix, *arguments)
            return reduced(builder, width, first, combine, partial(load, builder, numbers))

        return types.float32(matrix, types.intp), generate

    return reduce


total_of, largest_of = row_reduction(0, add), row_reduction(-math.inf, larger)


def _total_of_squares(context: Any, matrix: Any, row: Any, shift: Any) -> Any:
    """The sum of the squares of a row's numbers less `shift`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, width = row_of(context, builder, matrix, *arguments[:2])

        def squares_at(index: Any, lanes: int) -> Any:
            number = builder.fsub(load(builder, numbers, index, lanes), splat(builder, arguments[2], lanes))
            return builder.fmul(number, number)

        return reduced(builder, width, 0, add, squares_at)

    return types.float32(matrix, types.intp, types.float32), generate


total_of_squares: Callable[..., float] = intrinsic(_total_of_squares)


def _dot(context: Any, x: Any, x_row: Any, matrix: Any, matrix_row: Any) -> Any:
    """The dot product of row x_row of x and row matrix_row of the matrix, which are equally wide."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers, width = row_of(context, builder, x, *arguments[:2])
        factors, _ = row_of(context, builder, matrix, *arguments[2:])

        def products_at(index: Any, lanes: int) -> Any:
            return builder.fmul(load(builder, numbers, index, lanes), load(builder, factors, index, lanes))

        return reduced(builder, width, 0, add, products_at)

    return types.float32(x, types.intp, matrix, types.intp), generate


dot: Callable[..., float] = intrinsic(_dot)
