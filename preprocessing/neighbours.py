"""Codes told by their neighbours, for many pictures at once.

A code is told in two steps: first its kind, given what stands left of it, above it and between these two; then which
code of its group it is. The kinds are: 0 the same as left, 1 the same as above, 2 + g another code, of group g. Both
steps are entropy-coded (`preprocessing.rans`), one lane for each picture, with frequencies of these very pictures.

The bytes for R pictures of side * side codes in raster order, little-endian:

    2    K: every code is below it
    1    G, groups of codes, at most 32
    1    0
    2    C, contexts with frequencies of their own
    4    bytes of the tables
    ...  tables: one Brotli stream of these bytes:
           K            group of each code, 0..G-1
           8 * (G+1)^2  1 for each context with frequencies of its own, else 0
           (8+C)(G+2)   level of each kind: for 0..7, the patterns, then for the contexts with their own
           K            level of each code among those of its group
    4 R  states of the lanes
    ...  words of 16 bits, to the end

The context of a place whose neighbours are a (left), b (above) and d (above left) has the number
(p * (G+1) + group of b) * (G+1) + group of a; p, its pattern, is 1 if a = b, plus 2 if a = d, plus 4 if b = d. Outside
the picture stands one more code, of group G. A context without frequencies of its own has those of its pattern. Levels
become frequencies as `preprocessing.rans.Table` says: in shares of 2**11 for kinds; for codes, numbered within their
group in ascending order, of 2**b, where b is the least from 12 to 16 that has room for 16 times the largest group.

Place after place is decoded for all pictures: the kinds of all, and then the codes of all that are of a group. The
state that is left after the place before the last holds the last code: LOW + code.
"""

import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from dalle_lean.require import require
from preprocessing.grouping import group_codes
from preprocessing.rans import LOW, MAX_LEVEL, Decoder, Encoder, Lookup, Table, levels_of

HEADER = struct.Struct("<HBBHI")
MAX_GROUPS = 32
CODES_A_GROUP = 4
"""There are fewer groups where they would become smaller than this."""
PATTERNS = 8
OWN_TABLE = 100
"""A context that comes so often has frequencies of its own."""
KIND_BITS = 11
SAME_AS_LEFT, SAME_AS_ABOVE, FIRST_GROUP = range(3)


@dataclass(frozen=True)
class Model:
    """What both sides know before the first code."""

    group: NDArray[np.uint8]
    """[K], 0..G-1."""
    num_groups: int
    has_own: NDArray[np.bool_]
    """[PATTERNS * (G+1)**2]"""
    kind_levels: NDArray[np.uint8]
    """[PATTERNS + C, FIRST_GROUP + G]"""
    code_levels: NDArray[np.uint8]
    """[K]"""

    @property
    def groups_or_outside(self) -> NDArray[np.int64]:
        """[K+1]: group of each code; the last is what stands outside the picture, and has the number -1 too."""
        return np.append(self.group, self.num_groups).astype(np.int64)

    def members(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Number of each code within its group [K]; and the code of each kind and number [FIRST_GROUP + G, S]."""
        sizes = np.bincount(self.group, minlength=self.num_groups)
        order = np.argsort(self.group, kind="stable")
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order)) - (sizes.cumsum() - sizes)[self.group[order]]
        codes = np.zeros((FIRST_GROUP + self.num_groups, sizes.max()), np.int64)
        codes[FIRST_GROUP + self.group.astype(np.int64), number] = np.arange(len(order))
        return number, codes

    def tables(self) -> tuple[Table, Table]:
        """Frequencies of the kinds in each context, and of the numbers of the codes in each kind."""
        number, codes = self.members()
        largest = codes.shape[1]
        levels = np.zeros(codes.shape, np.uint8)
        levels[FIRST_GROUP + self.group.astype(np.int64), number] = self.code_levels
        bits = min(16, max(12, (16 * largest - 1).bit_length()))
        return Table(self.kind_levels, KIND_BITS), Table(levels, bits)

    def to_bytes(self) -> bytes:
        parts = (self.group, self.has_own.astype(np.uint8), self.kind_levels, self.code_levels)
        return b"".join(part.tobytes() for part in parts)


def encode(grid: NDArray[np.int16]) -> bytes:
    """codes [R, side, side], not negative -> bytes; the same codes give the same bytes."""
    side = grid.shape[-1]
    model, contexts, kinds = fit(grid)
    of_kinds, of_codes = model.tables()
    number = model.members()[0]
    encoder = Encoder(LOW + grid[:, -1, -1].astype(np.int64))
    table_of_context = tables_of_contexts(model.has_own, model.num_groups)
    for place in reversed(range(side * side - 1)):
        here = divmod(place, side)
        kind = kinds[:, *here].astype(np.int64)
        among = np.where(kind >= FIRST_GROUP, number[grid[:, *here]], 0)
        encoder.push(of_codes, kind, among)
        encoder.push(of_kinds, table_of_context[contexts[:, *here]], kind)
    states, words = encoder.finish()
    codec = require("pyarrow", extra="preprocessing").Codec("brotli", compression_level=11)
    tables = codec.compress(model.to_bytes(), asbytes=True)
    own_tables = len(model.kind_levels) - PATTERNS
    header = HEADER.pack(len(model.group), model.num_groups, 0, own_tables, len(tables))
    return b"".join((header, tables, states.astype("<u4").tobytes(), words.astype("<u2").tobytes()))


def tables_of_contexts(has_own: NDArray[np.bool_], num_groups: int) -> NDArray[np.int64]:
    """Context -> row of a model's `kind_levels`."""
    patterns = np.arange(len(has_own)) // (num_groups + 1) ** 2
    return np.where(has_own, PATTERNS - 1 + has_own.cumsum(), patterns)


def fit(grid: NDArray[np.int16]) -> tuple[Model, NDArray[np.int16], NDArray[np.uint8]]:
    """A model of the codes [R, h, w]; the context and the kind of each [R, h, w]."""
    codebook_size = int(grid.max()) + 1
    num_groups = max(1, min(MAX_GROUPS, codebook_size // CODES_A_GROUP))
    group = group_codes(grid, codebook_size, num_groups)
    contexts, kinds = describe(grid, group, num_groups)
    # The last code of a picture is told by the state.
    told_in, told, codes = (values.reshape(len(grid), -1)[:, :-1].ravel() for values in (contexts, kinds, grid))
    has_own = np.bincount(told_in, minlength=PATTERNS * (num_groups + 1) ** 2) >= OWN_TABLE
    num_kinds, num_tables = FIRST_GROUP + num_groups, PATTERNS + int(has_own.sum())
    cells = tables_of_contexts(has_own, num_groups)[told_in] * num_kinds + told
    kind_counts = np.bincount(cells, minlength=num_tables * num_kinds).reshape(num_tables, num_kinds)
    code_counts = np.bincount(codes[told >= FIRST_GROUP], minlength=codebook_size)
    return Model(group, num_groups, has_own, levels_of(kind_counts), levels_of(code_counts)), contexts, kinds


def describe(
    grid: NDArray[np.int16], group: NDArray[np.uint8], num_groups: int
) -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    """The context and the kind of every code [R, h, w]."""
    framed = np.pad(grid, ((0, 0), (1, 0), (1, 0)), constant_values=-1)
    left, above, between = framed[:, 1:, :-1], framed[:, :-1, 1:], framed[:, :-1, :-1]
    groups = np.append(group, num_groups).astype(np.int16)
    contexts = (left == above) + 2 * (left == between).astype(np.int16) + 4 * (above == between).astype(np.int16)
    contexts = (contexts * (num_groups + 1) + groups[above]) * (num_groups + 1) + groups[left]
    kinds = FIRST_GROUP + group[grid]
    kinds[grid == above] = SAME_AS_ABOVE
    kinds[grid == left] = SAME_AS_LEFT
    return contexts.astype(np.int16), kinds


def decode(content: bytes, rows: int, side: int, codebook_size: int) -> NDArray[np.int16]:
    """Bytes -> codes [rows, side * side], the last of each picture unchecked; ValueError for what was never encoded."""
    if len(content) < HEADER.size:
        raise ValueError("packed codes end too early")
    codes_used, num_groups, zero, own_tables, table_bytes = HEADER.unpack_from(content)
    if not 1 <= codes_used <= codebook_size:
        raise ValueError(f"packed codes in 0..{codes_used - 1}; must be in 0..{codebook_size - 1}")
    lanes_at = HEADER.size + table_bytes
    words_at = lanes_at + 4 * rows
    if zero or words_at > len(content) or (len(content) - words_at) % 2:
        raise ValueError(f"{len(content)} bytes of packed codes are too few or too many")
    model = read_model(content[HEADER.size : lanes_at], codes_used, num_groups, own_tables)
    states = np.frombuffer(content, "<u4", rows, lanes_at)
    if states.min() < LOW:
        raise ValueError("packed codes: a lane's state is out of range")
    decoder = Decoder(states, np.frombuffer(content, "<u2", offset=words_at))
    codes = fastest_walk()(decoder, model, side)
    if decoder.used != len(decoder.words):
        raise ValueError(f"packed codes: {len(decoder.words) - decoder.used} words are left over")
    return codes


def read_model(tables: bytes, codes_used: int, num_groups: int, own_tables: int) -> Model:
    """The tables of a block, checked."""
    if not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(f"packed codes of {num_groups} groups; must be 1..{MAX_GROUPS}")
    contexts, num_kinds = PATTERNS * (num_groups + 1) ** 2, FIRST_GROUP + num_groups
    if own_tables > contexts:
        raise ValueError(f"packed codes: {own_tables} tables for {contexts} contexts")
    sizes = [codes_used, contexts, (PATTERNS + own_tables) * num_kinds, codes_used]
    codec = require("pyarrow", extra="preprocessing").Codec("brotli")
    content = codec.decompress(tables, decompressed_size=sum(sizes), asbytes=True)
    parts = np.split(np.frombuffer(content, np.uint8), np.cumsum(sizes)[:-1])
    group, has_own, kind_levels, code_levels = parts
    if group.max() >= num_groups or has_own.max() > 1 or has_own.sum() != own_tables:
        raise ValueError("packed codes: damaged tables")
    if max(kind_levels.max(), code_levels.max()) > MAX_LEVEL:
        raise ValueError("packed codes: damaged frequencies")
    return Model(group, num_groups, has_own.astype(bool), kind_levels.reshape(-1, num_kinds), code_levels)


@cache
def fastest_walk() -> Callable[[Decoder, Model, int], NDArray[np.int16]]:
    """`walk`, compiled where numba is installed; a warning where it is and does not work."""
    try:
        from preprocessing.neighbours_compiled import walk as compiled_walk
    except ModuleNotFoundError:
        return walk
    except ImportError as error:
        warnings.warn(f"numba cannot be used, packed codes are slower to read: {error}", stacklevel=2)
        return walk
    return compiled_walk


def walk(decoder: Decoder, model: Model, side: int) -> NDArray[np.int16]:
    """All lanes to their end -> codes [R, side * side]; the last of each picture is not checked."""
    rows, across = len(decoder.states), model.num_groups + 1
    kind_table, code_table = model.tables()
    of_kinds, of_codes = Lookup(kind_table), Lookup(code_table, names=model.members()[1])
    context_of_place = of_kinds.context(tables_of_contexts(model.has_own, model.num_groups))
    groups, pattern_part = model.groups_or_outside, across**2 * np.arange(4)
    codes = np.empty((rows, side, side), np.int16)
    above = np.full((side + 1, rows), -1, np.int16)  # a row of codes, and before it what stands outside
    groups_above = np.full((side, rows), model.num_groups)
    for y in range(side):
        here = np.full((side + 1, rows), -1, np.int16)
        # What the row above has to say, for the whole row at once.
        contexts = (4 * across * (above[1:] == above[:-1]) + groups_above) * across
        groups_here = np.full((side + 1, rows), model.num_groups)
        for x in range(side):
            if (y, x) == (side - 1, side - 1):
                here[-1] = decoder.states - LOW
                break
            pattern = (here[x] == above[x + 1]).view(np.uint8) + 2 * (here[x] == above[x]).view(np.uint8)
            context = contexts[x]
            context += groups_here[x]
            context += pattern_part.take(pattern, mode="clip")
            kinds = decoder.pop(of_kinds, context_of_place.take(context, mode="clip"))
            found = decoder.pop(of_codes, of_codes.context(kinds))
            found = np.where(kinds == SAME_AS_ABOVE, above[x + 1], found)
            here[x + 1] = np.where(kinds == SAME_AS_LEFT, here[x], found)
            groups.take(here[x + 1], mode="wrap", out=groups_here[x + 1])
        above, groups_above = here, groups_here[1:]
        codes[:, y] = here[1:].T
    return codes.reshape(rows, side * side)
