"""How few bytes hold the codes of pictures, and how fast are they read again?

    python -m benchmarks.packing data/emoji64/train [--pictures 4096] [--scenes 2048] [--keep FOLDER]

On the codes of `benchmarks.code_samples`. Bytes of the codings are those of the codes alone, of the shards those of
the whole file with captions and keys; ratios are to the same pictures as JPEG of quality 95. MB/s are of int16 codes,
on one core, by processor time, the best of several runs. `--keep` keeps the codes for the next time.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import brotli
import numpy as np
import torch

from benchmarks.code_samples import SCENE_SIDE, Codes, Sample, keep, kept_samples, make_samples
from benchmarks.report import print_json, print_table
from preprocessing.packing import BY_NEIGHBOURS, MAX_PICTURES, pack, unpack
from preprocessing.rans import LOW, Decoder, Encoder, Lookup, Table, levels_of
from preprocessing.shards import LAYOUTS, Row, read_blocks, write_shard

BUDGET_MB_S = 50
REPEATS = 5


class Coding(NamedTuple):
    """One way to turn codes into bytes, and back."""

    name: str
    encode: Callable[[Codes, int], bytes]
    decode: Callable[[bytes, tuple[int, int], int], Codes]


def brotli_int16(level: int) -> Coding:
    def decode(content: bytes, shape: tuple[int, int], _: int) -> Codes:
        return np.frombuffer(brotli.decompress(content), "<i2").reshape(shape)

    return Coding(f"int16, Brotli {level}", lambda codes, _: compressed(codes.astype("<i2").tobytes(), level), decode)


def compressed(content: bytes, level: int = 11) -> bytes:
    return bytes(brotli.compress(content, quality=level, lgwin=24))


def encode_planes(codes: Codes, _: int) -> bytes:
    return compressed((codes & 255).astype(np.uint8).tobytes() + (codes >> 8).astype(np.uint8).tobytes())


def decode_planes(content: bytes, shape: tuple[int, int], _: int) -> Codes:
    low, high = np.frombuffer(brotli.decompress(content), np.uint8).reshape(2, *shape)
    return low.astype(np.int16) | high.astype(np.int16) << 8


def encode_places(codes: Codes, _: int) -> bytes:
    return compressed(codes.T.astype("<i2").tobytes())


def decode_places(content: bytes, shape: tuple[int, int], _: int) -> Codes:
    return np.ascontiguousarray(np.frombuffer(brotli.decompress(content), "<i2").reshape(shape[::-1]).T)


def encode_bits(codes: Codes, codebook_size: int) -> bytes:
    """Every code in as few bits as any needs, 13 for 8,192."""
    shifts = np.arange((codebook_size - 1).bit_length())
    return np.packbits((codes.ravel()[:, None] >> shifts & 1).astype(np.uint8), bitorder="little").tobytes()


def decode_bits(content: bytes, shape: tuple[int, int], codebook_size: int) -> Codes:
    bits = (codebook_size - 1).bit_length()
    starts = np.arange(shape[0] * shape[1]) * bits
    padded = np.frombuffer(content + bytes(4), np.uint8)
    first = starts >> 3
    words = padded[first] | padded[first + 1].astype(np.int32) << 8 | padded[first + 2].astype(np.int32) << 16
    return (words >> (starts & 7) & (2**bits - 1)).astype(np.int16).reshape(shape)


def encode_entropy(codes: Codes, codebook_size: int) -> bytes:
    """Frequencies alone, no neighbours: rANS with one table."""
    levels = levels_of(np.bincount(codes.ravel(), minlength=codebook_size))[None]
    table, encoder = Table(levels, 16), Encoder(np.full(len(codes), LOW))
    nothing = np.zeros(len(codes), np.int64)
    for place in reversed(range(codes.shape[1])):
        encoder.push(table, nothing, codes[:, place].astype(np.int64))
    states, words = encoder.finish()
    return levels.tobytes() + states.tobytes() + words.tobytes()


def decode_entropy(content: bytes, shape: tuple[int, int], codebook_size: int) -> Codes:
    rows, num_codes = shape
    lookup = Lookup(Table(np.frombuffer(content, np.uint8, codebook_size)[None], 16))
    states = np.frombuffer(content, np.uint32, rows, codebook_size)
    decoder = Decoder(states, np.frombuffer(content, np.uint16, offset=codebook_size + 4 * rows))
    nothing, codes = np.zeros(rows, np.int64), np.empty((num_codes, rows), np.int16)
    for place in range(num_codes):
        codes[place] = decoder.pop(lookup, nothing)
    return np.ascontiguousarray(codes.T)


def decode_packed(content: bytes, shape: tuple[int, int], codebook_size: int) -> Codes:
    return unpack(content, rows=shape[0], num_codes=shape[1], codebook_size=codebook_size)


CODINGS = (
    brotli_int16(8),
    brotli_int16(11),
    Coding("byte planes, Brotli 11", encode_planes, decode_planes),
    Coding("place after place, Brotli 11", encode_places, decode_places),
    Coding("bits as few as the codebook needs", encode_bits, decode_bits),
    Coding("entropy of single codes (rANS)", encode_entropy, decode_entropy),
    Coding("packed: by neighbours (rANS)", lambda codes, _: pack(codes, BY_NEIGHBOURS), decode_packed),
)


class Measured(NamedTuple):
    """What a coding makes of a sample."""

    bytes_per_picture: float
    encode_mb_s: float
    decode_mb_s: float


def measure(coding: Coding, sample: Sample) -> Measured:
    """Sizes and speeds, and that the codes come back."""
    encode_s, content = timed(lambda: coding.encode(sample.codes, sample.codebook_size), 1)
    decode_s, decoded = timed(lambda: coding.decode(content, sample.codes.shape, sample.codebook_size), REPEATS)
    assert np.array_equal(decoded, sample.codes), coding.name
    megabytes = sample.codes.nbytes / 1e6
    return Measured(len(content) / len(sample.codes), megabytes / encode_s, megabytes / decode_s)


def timed(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """The least processor time of some runs, in seconds, and the result."""
    best = math.inf
    for _ in range(repeats):
        started = time.process_time()
        result = function()
        best = min(best, time.process_time() - started)
    return best, result


def measure_files(sample: Sample) -> dict[str, Measured]:
    """Whole shards of both layouts, captions and all; reading is to rows with captions."""
    rows = [
        Row(
            caption=caption,
            codes=codes,
            nsfw="UNLIKELY",
            original_width=SCENE_SIDE,
            original_height=SCENE_SIDE,
            url=None,
            key=f"{number:06d}.png",
        )
        for number, (caption, codes) in enumerate(zip(sample.captions, sample.codes, strict=True))
    ]
    found = {}
    num_codes, megabytes = sample.codes.shape[1], sample.codes.nbytes / 1e6
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            path = Path(folder) / f"{layout}.parquet"
            write_s, _ = timed(lambda path=path, layout=layout: write_shard(path, rows, layout=layout), 1)
            read_s, _ = timed(lambda path=path: list(read_blocks(path, num_codes, sample.codebook_size)), REPEATS)
            found[f"shard, {layout}"] = Measured(
                path.stat().st_size / len(rows), megabytes / write_s, megabytes / read_s
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Encode the pictures, try every coding, name the smallest within the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="pictures of 64 x 64 pixels with metadata.jsonl")
    parser.add_argument("--pictures", type=int, default=MAX_PICTURES, help="of the folder")
    parser.add_argument("--scenes", type=int, default=2048, help="to draw at 256 x 256; 0: none")
    parser.add_argument("--packages", type=Path, default=Path("data/npm/node_modules"), help="the emoji packages")
    parser.add_argument("--keep", type=Path, help="folder for the codes; where it holds some, they are taken")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    samples = kept_samples(options.keep) if options.keep else {}
    if not samples:
        samples = make_samples(options.folder, options.pictures, options.scenes, options.packages)
        if options.keep:
            keep(samples, options.keep)
    figures = {}
    for name, sample in samples.items():
        rows = {coding.name: measure(coding, sample) for coding in CODINGS}
        fast = {coding: found for coding, found in rows.items() if found.decode_mb_s >= BUDGET_MB_S}
        smallest = min(fast, key=lambda coding: fast[coding].bytes_per_picture) if fast else None
        rows |= measure_files(sample)
        num_codes = sample.codes.shape[1]
        print(f"\n{name}: {len(sample.codes)} pictures, {num_codes} codes of {sample.codebook_size} each; a JPEG has")
        print(f"{sample.jpeg_bytes:.0f} bytes. Smallest within {BUDGET_MB_S} MB/s: {smallest}\n")
        print_table(
            ("coding", "bytes a picture", "to JPEG", "bits a code", "encode, MB/s", "decode, MB/s"),
            [
                (
                    coding,
                    f"{found.bytes_per_picture:.1f}",
                    f"1 : {sample.jpeg_bytes / found.bytes_per_picture:.1f}",
                    f"{8 * found.bytes_per_picture / num_codes:.2f}",
                    f"{found.encode_mb_s:.1f}",
                    f"{found.decode_mb_s:.0f}",
                )
                for coding, found in rows.items()
            ],
        )
        figures[name] = {
            "pictures": len(sample.codes),
            "jpeg_bytes": round(sample.jpeg_bytes),
            "smallest": smallest,
            "codings": {coding: [round(value, 2) for value in found] for coding, found in rows.items()},
        }
    print_json("packing", {"fields": list(Measured._fields), **figures})


if __name__ == "__main__":
    main()
