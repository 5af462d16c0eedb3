"""Spoilt tars, Parquet files and pictures, read as a run would read them; `python -m tests.preprocessing.fuzz KIND N`.

Runs as a program of its own, so that a crash is seen, and prints one line of JSON: reasons and their counts, what broke
a promise, and how many bytes the memory grew.
"""

import io
import json
import random
import struct
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dalle_lean.images.files import UnusablePicture, open_picture, quiet_pillow, square_pixels
from preprocessing.encoding.decoding import Candidate, Decoding
from preprocessing.sources import Sample
from preprocessing.sources.parquet import ParquetShards
from preprocessing.sources.tar import TarShards
from tests.preprocessing.processes import peak_bytes
from tests.preprocessing.shards_of_pictures import emoji_rows, encoded, tar_bytes, tar_members

EMOJI = Path(__file__).parents[1] / "data" / "emoji"
MAX_PIXELS = 2**20
SIDE = 16
ROWS = 8
"""Pictures of each shard."""


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def flip_bits(data: bytes, draw: random.Random) -> bytes:
    spoilt = bytearray(data)
    for _ in range(draw.choice((1, 1, 4, 64))):
        spoilt[draw.randrange(len(spoilt))] ^= 1 << draw.randrange(8)
    return bytes(spoilt)


def flip_early_bits(data: bytes, draw: random.Random) -> bytes:
    """Where headers are."""
    return flip_bits(data[:600], draw) + data[600:]


def flip_late_bits(data: bytes, draw: random.Random) -> bytes:
    """Where a Parquet file has its footer."""
    return data[:-2000] + flip_bits(data[-2000:], draw)


def overwrite(data: bytes, draw: random.Random) -> bytes:
    start, length = draw.randrange(len(data)), draw.choice((4, 8, 512, 5000))
    filling = draw.choice((bytes(length), b"\xff" * length, draw.randbytes(length)))
    return data[:start] + filling + data[start + length :]


def leave_out(data: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(data))
    return data[:start] + data[start + draw.choice((1, 7, 512, 5000)) :]


def repeat(data: bytes, draw: random.Random) -> bytes:
    start, stop = sorted(draw.randrange(len(data)) for _ in range(2))
    return data[:stop] + data[start:]


def enlarge(data: bytes, draw: random.Random) -> bytes:
    """A number somewhere becomes a huge one."""
    start = draw.randrange(max(1, min(len(data), 2000)))
    number = struct.pack(draw.choice("<>") + draw.choice("IQ"), draw.choice((2**31 - 1, 2**32 - 1, 2**24)))
    return data[:start] + number + data[start + len(number) :]


SPOIL: list[Callable[[bytes, random.Random], bytes]] = [
    cut, flip_bits, flip_early_bits, flip_late_bits, overwrite, leave_out, repeat, enlarge,
]  # fmt: skip


def png_that_claims(width: int, height: int) -> bytes:
    """A small PNG with a sound header of any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    chunks = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    packed = [struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def pictures() -> list[bytes]:
    """Real pictures of every kind that is out there."""
    frames = [Image.open(EMOJI / f"{number:03d}.png").convert("RGBA").resize((64, 48)) for number in range(4)]
    image, grey = frames[0].convert("RGB"), np.asarray(frames[1].convert("L"))
    rotated = Image.Exif()
    rotated[0x0112] = 6
    return [
        encoded(image, "JPEG", quality=90),
        encoded(image, "JPEG", progressive=True, exif=rotated),
        encoded(image.convert("CMYK"), "JPEG"),
        encoded(image.convert("L"), "JPEG"),
        encoded(frames[0], "PNG"),
        encoded(image.quantize(16), "PNG", transparency=3),
        encoded(Image.fromarray(grey.astype(np.uint16) * 257), "PNG"),
        encoded(image.convert("1"), "PNG"),
        encoded(image.convert("LA"), "PNG", exif=rotated),
        encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        encoded(frames[0], "WEBP", lossless=True),
        encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], exif=rotated),
        encoded(image, "GIF", save_all=True, append_images=frames[1:]),
        encoded(image, "BMP"),
        encoded(image.quantize(16), "BMP"),
        encoded(image, "TIFF", compression="tiff_lzw"),
        encoded(image.convert("CMYK"), "TIFF", compression="tiff_adobe_deflate"),
        encoded(Image.fromarray(grey.astype(np.uint16) * 257), "TIFF"),
        encoded(image, "TIFF", compression="jpeg", save_all=True, append_images=frames[1:2]),
        encoded(Image.new("RGB", (2000, 1000)), "PNG"),
        encoded(Image.new("1", (3000, 3000)), "PNG"),
        png_that_claims(1024, 1024),
        png_that_claims(2**31 - 1, 2**31 - 1),
        encoded(Image.new("L", (60_000, 60)), "GIF"),
    ]  # fmt: skip


def spoil_pictures(sound: list[bytes], count: int, draw: random.Random) -> tuple[Counter[str], list[str]]:
    reasons, broken = Counter[str](), []
    for picture in sound:
        for _ in range(2):
            reasons[decode_picture(picture, broken)] += 1
    for number in range(count):
        picture = draw.choice(SPOIL)(draw.choice(sound), draw)
        if draw.random() < 0.2:
            picture = draw.choice(SPOIL)(picture or b"x", draw)
        before = len(broken)
        reasons[decode_picture(picture, broken)] += 1
        broken[before:] = [f"picture {number}: {what}" for what in broken[before:]]
    return reasons, broken


def decode_picture(picture: bytes, broken: list[str]) -> str:
    try:
        pixels = square_pixels(open_picture(picture, MAX_PIXELS), SIDE)
    except UnusablePicture as error:
        return error.reason
    if pixels.shape != (SIDE, SIDE, 3) or pixels.dtype != np.uint8:
        broken.append(f"{pixels.dtype} {pixels.shape}")
    return "kept"


def tars(rows: list[dict]) -> list[bytes]:
    members = tar_members(rows)
    long_names = [("a long name/" * 20 + name, content) for name, content in members]
    return [tar_bytes(members), tar_bytes(members, format=0), tar_bytes(members, format=1), tar_bytes(long_names)]


def parquets(rows: list[dict]) -> list[bytes]:
    nested = [{"image": {"bytes": row["jpg"], "path": None}, "text": row["caption"], "key": row["key"]} for row in rows]
    found = []
    for table in (pa.Table.from_pylist(rows), pa.Table.from_pylist(nested)):
        for options in (
            {"compression": "none", "use_dictionary": False},
            {"compression": "snappy", "row_group_size": 3},
            {"compression": "zstd", "write_page_checksum": True, "row_group_size": 4},
            {"compression": "brotli", "data_page_version": "2.0", "row_group_size": 2},
        ):
            file = io.BytesIO()
            pq.write_table(table, file, **options)
            found.append(file.getvalue())
    return found


SHARDS = {"tar": (TarShards, tars), "parquet": (ParquetShards, parquets)}
"""Kinds of shards: their source, and sound ones with the given rows."""


def spoil_shards(kind: str, shards: list[bytes], count: int, draw: random.Random) -> tuple[Counter[str], list[str]]:
    """Every picture must come out, or the shard must count a problem."""
    source_type, _ = SHARDS[kind]
    decoding = Decoding(side=SIDE, max_pixels=MAX_PIXELS)
    reasons, broken = Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"00000.{kind}"
        for number in range(count):
            spoilt = draw.choice(SPOIL)(draw.choice(shards), draw)
            path.write_bytes(spoilt)
            samples: list[Sample] = list(source_type([str(path)]).samples(0))
            problems = sum(sample.problem is not None for sample in samples)
            lost = ROWS - sum(sample.problem is None for sample in samples)
            if lost > 0 and not problems:
                broken.append(f"{kind} {number}: {lost} pictures lost, none counted")
            for sample in samples:
                result = decoding(sample)
                reasons["kept" if isinstance(result, Candidate) else result.reason] += 1
    return reasons, broken


def main(kind: str, count: int, seed: int) -> None:
    draw = random.Random(f"{kind} {seed}")
    sound = pictures() if kind == "picture" else SHARDS[kind][1](emoji_rows(EMOJI, ROWS))
    before = peak_bytes()
    with quiet_pillow():
        spoil = spoil_pictures(sound, count, draw) if kind == "picture" else spoil_shards(kind, sound, count, draw)
    print(json.dumps({"reasons": spoil[0], "broken": spoil[1], "grown_bytes": peak_bytes() - before}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
