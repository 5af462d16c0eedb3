"""Packed codes against the description of their format, read slowly, code by code."""

import math
import struct
import sys
import zlib
from types import ModuleType

import brotli
import numpy as np
import pytest

from preprocessing import neighbours
from preprocessing.packing import BY_BROTLI, BY_NEIGHBOURS, FEWEST_BY_NEIGHBOURS, HEADER, MAX_PICTURES, pack, unpack
from preprocessing.rans import WEIGHTS, Table, levels_of

CODEBOOK_SIZE = 300


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    """With numba and without."""
    if request.param == "compiled":
        pytest.importorskip("numba")
        assert neighbours.fastest_walk() is not neighbours.walk
    else:
        monkeypatch.setattr(neighbours, "fastest_walk", lambda: neighbours.walk)
    return request.param


def make_codes(kind, rows=40, side=8, codebook_size=CODEBOOK_SIZE, seed=0):
    """Codes [rows, side * side] with structure of one kind or another."""
    random = np.random.default_rng(seed)
    if kind == "random":
        return random.integers(0, codebook_size, (rows, side * side), dtype=np.int16)
    if kind == "one code":
        return np.full((rows, side * side), 7, np.int16)
    if kind == "runs":  # flat patches, as pictures have them
        patches = random.integers(0, codebook_size, (rows, side // 2, side // 2), dtype=np.int16)
        return patches.repeat(2, axis=1).repeat(2, axis=2).reshape(rows, side * side)
    if kind == "skewed":
        codes = random.geometric(0.05, (rows, side * side)) - 1
        return np.minimum(codes, codebook_size - 1).astype(np.int16)
    raise ValueError(kind)


def slow_frequencies(levels, bits):
    """As the docstring of Table has it, one symbol at a time."""
    weight = [0 if level == 0 else math.isqrt(2 ** (int(level) + 7)) for level in levels]
    possible = sum(level > 0 for level in levels)
    if not possible:
        return [2**bits] + [0] * (len(levels) - 1)
    frequency = [one and 1 + one * (2**bits - possible) // sum(weight) for one in weight]
    frequency[frequency.index(max(frequency))] += 2**bits - sum(frequency)
    return frequency


def slow_unpack(block):
    """The format's description, followed code by code with plain integers."""
    magic, method, zero, side, rows, checksum = struct.unpack("<4sBBHII", block[:16])
    assert (magic, method, zero) == (b"DLP1", 0, 0)
    codes_used, num_groups, zero, own, table_bytes = struct.unpack("<HBBHI", block[16:26])
    assert zero == 0
    tables = brotli.decompress(block[26 : 26 + table_bytes])
    across = num_groups + 1
    contexts, num_kinds = 8 * across**2, 2 + num_groups
    group, tables = tables[:codes_used], tables[codes_used:]
    has_own, tables = tables[:contexts], tables[contexts:]
    kind_levels, code_levels = tables[: (8 + own) * num_kinds], tables[(8 + own) * num_kinds :]
    assert len(code_levels) == codes_used

    members = [[code for code in range(codes_used) if group[code] == one] for one in range(num_groups)]
    largest = max(map(len, members))
    code_bits = next(bits for bits in range(12, 17) if bits == 16 or 2**bits >= 16 * largest)
    kind_frequencies = [
        slow_frequencies(kind_levels[row * num_kinds : (row + 1) * num_kinds], 11) for row in range(8 + own)
    ]
    code_frequencies = [slow_frequencies([code_levels[code] for code in codes] or [0], code_bits) for codes in members]

    at = 26 + table_bytes
    states = list(struct.unpack(f"<{rows}I", block[at : at + 4 * rows]))
    words = iter(struct.unpack(f"<{(len(block) - at) // 2 - 2 * rows}H", block[at + 4 * rows :]))

    def pop(row, frequency, bits):
        slot, symbol, start = states[row] % 2**bits, 0, 0
        while start + frequency[symbol] <= slot:
            start += frequency[symbol]
            symbol += 1
        states[row] = frequency[symbol] * (states[row] >> bits) + slot - start
        if states[row] < 2**16:
            states[row] = states[row] * 2**16 + next(words)
        return symbol

    pictures = [[[None] * side for _ in range(side)] for _ in range(rows)]

    def code_at(row, y, x):
        return pictures[row][y][x] if y >= 0 and x >= 0 else -1

    def group_of(code):
        return num_groups if code < 0 else group[code]

    for y in range(side):
        for x in range(side):
            if (y, x) == (side - 1, side - 1):
                for row in range(rows):
                    pictures[row][y][x] = states[row] - 2**16
                break
            kinds = []
            for row in range(rows):
                a, b, d = code_at(row, y, x - 1), code_at(row, y - 1, x), code_at(row, y - 1, x - 1)
                pattern = (a == b) + 2 * (a == d) + 4 * (b == d)
                context = (pattern * across + group_of(b)) * across + group_of(a)
                table = 8 + sum(has_own[:context]) if has_own[context] else pattern
                kinds.append(pop(row, kind_frequencies[table], 11))
            for row, kind in enumerate(kinds):
                if kind == 0:
                    code = code_at(row, y, x - 1)
                elif kind == 1:
                    code = code_at(row, y - 1, x)
                else:
                    code = members[kind - 2][pop(row, code_frequencies[kind - 2], code_bits)]
                pictures[row][y][x] = code
    assert next(words, None) is None
    codes = np.array(pictures, np.int16).reshape(rows, side * side)
    assert zlib.crc32(codes.tobytes()) == checksum
    return codes


@pytest.mark.parametrize("kind", ["random", "one code", "runs", "skewed"])
def test_packed_codes_are_what_the_description_of_the_format_says(kind, way):
    codes = make_codes(kind)
    block = pack(codes, BY_NEIGHBOURS)
    assert (slow_unpack(block) == codes).all()
    assert (unpack(block, rows=40, num_codes=64, codebook_size=CODEBOOK_SIZE) == codes).all()


@pytest.mark.parametrize("method", [BY_NEIGHBOURS, BY_BROTLI])
@pytest.mark.parametrize(
    ("rows", "side", "codebook_size"),
    [(1, 1, 2), (1, 8, 2), (3, 2, 1), (MAX_PICTURES, 1, 2**15), (5, 32, 8192), (300, 16, 2**15)],
)
def test_every_size_comes_back(rows, side, codebook_size, method, way):
    codes = make_codes("random", rows, side, codebook_size)
    block = pack(codes, method)
    assert (unpack(block, rows=rows, num_codes=side * side, codebook_size=codebook_size) == codes).all()


@pytest.mark.parametrize("kind", ["random", "runs"])
def test_compiled_and_plain_walks_agree_on_damaged_bytes_too(kind, monkeypatch):
    """The checksum left aside, they give the same codes or the same error."""
    pytest.importorskip("numba")
    body = neighbours.encode(make_codes(kind).reshape(40, 8, 8))
    compiled, random, gave_codes = neighbours.fastest_walk(), np.random.default_rng(1), 0
    for _ in range(300):
        damaged = bytearray(body)
        damaged[int(random.integers(len(body)))] ^= int(random.integers(1, 256))
        found = []
        for walk in (compiled, neighbours.walk):
            monkeypatch.setattr(neighbours, "fastest_walk", lambda walk=walk: walk)
            try:
                found.append(neighbours.decode(bytes(damaged), 40, 8, CODEBOOK_SIZE).tobytes())
            except (ValueError, OSError) as error:
                found.append(str(error))
        assert found[0] == found[1]
        gave_codes += isinstance(found[0], bytes)
    assert gave_codes > 0


@pytest.mark.parametrize("numba", [None, ModuleType("numba")], ids=["absent", "broken"])
def test_without_numba_codes_are_read_nevertheless(numba, monkeypatch, recwarn):
    monkeypatch.setitem(sys.modules, "numba", numba)
    for name in ("preprocessing.neighbours_compiled", "dalle_lean.lamb_fused"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    neighbours.fastest_walk.cache_clear()
    try:
        assert neighbours.fastest_walk() is neighbours.walk
    finally:
        neighbours.fastest_walk.cache_clear()
    told = ["numba cannot be used, packed codes are slower to read" in str(warning.message) for warning in recwarn]
    assert told == ([] if numba is None else [True])


def test_few_pictures_are_plain_brotli():
    few, many = (make_codes("skewed", rows, side=4) for rows in (FEWEST_BY_NEIGHBOURS - 1, FEWEST_BY_NEIGHBOURS))
    assert brotli.decompress(pack(few)[HEADER.size :]) == few.tobytes()
    assert pack(many) == pack(many, BY_NEIGHBOURS)


@pytest.mark.parametrize("rows", [500, 2500])
def test_the_same_codes_give_the_same_bytes(rows):
    codes = make_codes("skewed", rows)
    assert pack(codes) == pack(codes.copy())


def test_random_codes_cost_hardly_more_than_their_bits():
    codes = make_codes("random", rows=1200, side=16, codebook_size=1024)
    assert len(pack(codes, BY_NEIGHBOURS)) < 1.03 * codes.size * 10 / 8


def test_codes_that_repeat_cost_less_than_brotli_makes_of_them():
    codes = make_codes("runs", rows=1200, side=16, codebook_size=1024)
    assert len(pack(codes, BY_NEIGHBOURS)) < len(brotli.compress(codes.tobytes(), quality=11))


@pytest.mark.parametrize("codes", [np.zeros((0, 16)), np.zeros((2, 15)), np.full((2, 16), -1), np.zeros((4097, 4))])
def test_what_cannot_be_packed_is_refused(codes):
    with pytest.raises(ValueError, match=r"codes \["):
        pack(codes.astype(np.int16))


@pytest.mark.parametrize("method", [BY_NEIGHBOURS, BY_BROTLI])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 41}, "40 pictures of 64 packed codes; must be 41 of 64"),
        ({"num_codes": 81}, "40 pictures of 64 packed codes; must be 40 of 81"),
        ({"codebook_size": 100}, r"packed codes (in )?0\.\.299; must be in 0\.\.99"),
    ],
)
def test_codes_of_another_size_or_range_are_refused(changes, message, method):
    codes = make_codes("random")
    codes[0, :2] = 0, CODEBOOK_SIZE - 1
    sizes = {"rows": 40, "num_codes": 64, "codebook_size": CODEBOOK_SIZE}
    with pytest.raises(ValueError, match=message):
        unpack(pack(codes, method), **{**sizes, **changes})


@pytest.mark.parametrize("method", [BY_NEIGHBOURS, BY_BROTLI])
@pytest.mark.parametrize("kind", ["random", "runs"])
def test_every_damaged_byte_is_noticed(kind, method, way):
    """One byte changed, bytes cut off, bytes added: always an error that the reader of shards names the shard in."""
    block = pack(make_codes(kind), method)
    random = np.random.default_rng(0)
    for trial in range(400):
        damaged = bytearray(block)
        position = int(random.integers(0, len(block))) if trial >= HEADER.size else trial
        damaged[position] ^= int(random.integers(1, 256))
        if trial % 4 == 1:
            damaged = damaged[:position]
        if trial % 4 == 2:
            damaged += random.bytes(int(random.integers(1, 9)))
        with pytest.raises((ValueError, OSError)):
            unpack(bytes(damaged), rows=40, num_codes=64, codebook_size=CODEBOOK_SIZE)


def test_frequencies_are_shares_of_a_power_of_two_and_never_lose_a_symbol():
    counts = np.random.default_rng(0).geometric(0.01, (50, 300)) // 40
    levels = levels_of(counts)
    table = Table(levels, 12)
    assert (table.frequency.sum(axis=1) == 2**12).all()
    assert ((table.frequency > 0) == (counts > 0)).all()
    for row in range(50):
        assert table.frequency[row].tolist() == slow_frequencies(levels[row], 12)
    assert WEIGHTS[1] == 16
