"""Codes of many pictures in few bytes, and yet quick to read: the block of the packed layout.

A block, little-endian:

    4    b"DLP1"
    1    method
    1    0
    2    side: a picture has side * side codes, in raster order
    4    R, pictures, at most 4096
    4    CRC-32 of the codes as int16, picture after picture
    ...  the codes, as the method has it

Method 0 tells codes by their neighbours: `preprocessing.neighbours`. Method 1 is one Brotli stream of the codes as
int16, picture after picture. Fewer than 2048 pictures are written with method 1: too few at once are slow to read with
the other, and do not pay for its tables.
"""

import math
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from dalle_lean.require import require
from preprocessing import neighbours

MAGIC = b"DLP1"
HEADER = struct.Struct("<4sBBHII")
MAX_PICTURES = 4096
BY_NEIGHBOURS, BY_BROTLI = range(2)
FEWEST_BY_NEIGHBOURS = 2048


def pack(codes: NDArray[np.int16], method: int | None = None) -> bytes:
    """codes [R, I] of R in 1..4096 pictures, I a square number -> a block; the same codes give the same bytes.

    `method` is BY_NEIGHBOURS or BY_BROTLI; by default it follows from R.
    """
    rows, num_codes = codes.shape
    side = math.isqrt(num_codes)
    if not 1 <= rows <= MAX_PICTURES or side < 1 or side * side != num_codes or codes.min() < 0:
        raise ValueError(
            f"codes [{rows}, {num_codes}] from {codes.min(initial=0)} on: must be of 1..{MAX_PICTURES} square pictures "
            "and not negative"
        )
    if method is None:
        method = BY_BROTLI if rows < FEWEST_BY_NEIGHBOURS else BY_NEIGHBOURS
    plain = codes.astype("<i2").tobytes()
    if method == BY_NEIGHBOURS:
        body = neighbours.encode(codes.reshape(rows, side, side))
    else:
        codec = require("pyarrow", extra="preprocessing").Codec("brotli", compression_level=11)
        body = codec.compress(plain, asbytes=True)
    return HEADER.pack(MAGIC, method, 0, side, rows, zlib.crc32(plain)) + body


def unpack(block: bytes, *, rows: int, num_codes: int, codebook_size: int) -> NDArray[np.int16]:
    """A block -> codes [rows, num_codes]; ValueError for one that is damaged, or of another size or range.

    Memory is what so many codes take, whatever the block says.
    """
    if len(block) < HEADER.size:
        raise ValueError(f"{len(block)} bytes are no packed codes")
    magic, method, zero, side, found_rows, checksum = HEADER.unpack_from(block)
    if magic != MAGIC or zero:
        raise ValueError(f"packed codes of format {magic!r} {zero}; must be {MAGIC!r} 0")
    if (found_rows, side * side) != (rows, num_codes):
        raise ValueError(f"{found_rows} pictures of {side * side} packed codes; must be {rows} of {num_codes}")
    if not 1 <= rows <= MAX_PICTURES:
        raise ValueError(f"{rows} pictures packed together; must be 1..{MAX_PICTURES}")
    body = block[HEADER.size :]
    if method == BY_NEIGHBOURS:
        codes = neighbours.decode(body, rows, side, codebook_size)
    elif method == BY_BROTLI:
        codec = require("pyarrow", extra="preprocessing").Codec("brotli")
        plain = codec.decompress(body, decompressed_size=2 * rows * num_codes, asbytes=True)
        codes = np.frombuffer(plain, "<i2").reshape(rows, num_codes)
    else:
        raise ValueError(f"packed codes of method {method}; must be {BY_NEIGHBOURS} or {BY_BROTLI}")
    if zlib.crc32(codes.astype("<i2", copy=False).data) != checksum:
        raise ValueError("packed codes do not match their checksum")
    if not 0 <= codes.min() <= codes.max() < codebook_size:
        raise ValueError(f"packed codes {codes.min()}..{codes.max()}; must be in 0..{codebook_size - 1}")
    return codes
