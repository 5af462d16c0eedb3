"""Codes of real pictures to measure with: drawings and the bundled VQGAN, no photographs.

- "64x64": the pictures of a folder, 8 x 8 codes of 1,024.
- "256x256": scenes of the emoji set drawn at 256 x 256 pixels, 32 x 32 codes of 1,024. The VQGAN learned from 64 x 64,
  but it is convolutions throughout.
- "256x256, 8192": the same, but every vector before quantization is given to the nearest of 8,192, which three rounds
  of k-means found: a stand-in for the published VQGAN's codebook.
"""

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from dalle_lean.folder import bundled_model
from dalle_lean.vqgan import VQGAN
from preprocessing.emoji.heldout import hold_out
from preprocessing.emoji.plan import plan_training
from preprocessing.emoji.render import draw, layered, sprite
from preprocessing.emoji.sets import read_drawings, read_things

SCENE_SIDE = 256
BATCH = 16
MANY_CODES = 8192

Codes = NDArray[np.int16]
"""[R, I]"""


@dataclass(frozen=True)
class Sample:
    """Codes of real pictures, with what else a shard holds."""

    codes: Codes
    codebook_size: int
    captions: list[str]
    jpeg_bytes: float
    """Of one picture, on average."""


def make_samples(folder: Path, pictures: int, num_scenes: int, packages: Path) -> dict[str, Sample]:
    """The three kinds of codes, of so many `pictures` of the folder and so many scenes."""
    vqgan = VQGAN.load(bundled_model() / "vqgan")
    known = vqgan.config.codebook_size
    codes, _, captions, jpeg_bytes = encode(vqgan, islice(folder_pictures(folder), pictures))
    samples = {"64x64": Sample(codes, known, captions, jpeg_bytes)}
    if num_scenes:
        codes, vectors, captions, jpeg_bytes = encode(vqgan, islice(scenes(packages), num_scenes))
        samples["256x256"] = Sample(codes, known, captions, jpeg_bytes)
        samples["256x256, 8192"] = Sample(quantize_finely(vectors), MANY_CODES, captions, jpeg_bytes)
    return samples


def folder_pictures(folder: Path) -> Iterator[tuple[Image.Image, str]]:
    """Pictures and captions of a folder with `metadata.jsonl`."""
    for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        with Image.open(folder / entry["file_name"]) as image:
            yield image.convert("RGB"), entry["text"]


def scenes(packages: Path) -> Iterator[tuple[Image.Image, str]]:
    """The emoji set's training pictures, drawn at SCENE_SIDE."""
    dropped: Counter[str] = Counter()
    drawings = read_drawings(packages, read_things(packages / "emojibase-data", dropped), dropped)
    for picture in plan_training(drawings, hold_out(drawings), seed=0):
        sprites = {placed.drawing: sprite(placed.drawing, SCENE_SIDE) for placed in picture.placed}
        yield draw(*layered(picture, sprites), SCENE_SIDE), picture.facts()["text"]


@torch.no_grad()
def encode(
    vqgan: VQGAN, pictures: Iterable[tuple[Image.Image, str]]
) -> tuple[Codes, NDArray[np.float16], list[str], float]:
    """Codes [R, I], the vectors before quantization [R, I, C], captions, and a JPEG's bytes on average."""
    codes, vectors, captions, jpeg_bytes = [], [], [], 0
    left = iter(pictures)
    while batch := list(islice(left, BATCH)):
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image, _ in batch])).permute(0, 3, 1, 2) / 255
        z = vqgan.latents(pixels * 2 - 1)
        codes.append(vqgan.quantize.scores(z).argmax(dim=1).flatten(1).numpy().astype(np.int16))
        vectors.append(z.permute(0, 2, 3, 1).flatten(1, 2).numpy().astype(np.float16))
        captions += [caption for _, caption in batch]
        jpeg_bytes += sum(jpeg_size(image) for image, _ in batch)
    return np.concatenate(codes), np.concatenate(vectors), captions, jpeg_bytes / len(captions)


def jpeg_size(image: Image.Image) -> int:
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95)
    return file.tell()


def quantize_finely(vectors: NDArray[np.float16]) -> Codes:
    """The nearest of MANY_CODES vectors for each of `vectors` [R, I, C]: three rounds of k-means on a part of them."""
    random = np.random.default_rng(0)
    flat = vectors.reshape(-1, vectors.shape[-1])
    some = np.unique(flat[random.choice(len(flat), min(len(flat), 400_000), replace=False)].round(2), axis=0)
    some = random.permutation(some).astype(np.float32)[:100_000]
    table = some[:MANY_CODES]  # fewer where there are not so many vectors
    for _ in range(3):
        nearest = nearest_of(some, table)
        count = np.bincount(nearest, minlength=len(table))
        sums = np.stack([np.bincount(nearest, column, minlength=len(table)) for column in some.T], axis=1)
        table = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], table).astype(np.float32)
    return nearest_of(flat.astype(np.float32), table).astype(np.int16).reshape(vectors.shape[:2])


def nearest_of(vectors: NDArray[np.float32], table: NDArray[np.float32]) -> NDArray[np.int64]:
    """The row of `table` [K, C] nearest to each of `vectors` [N, C]."""
    half = (table * table).sum(axis=1) / 2
    parts = np.array_split(vectors, max(1, len(vectors) // 20_000))
    return np.concatenate([(part @ table.T - half).argmax(axis=1) for part in parts])


def kept_samples(folder: Path) -> dict[str, Sample]:
    """What an earlier run kept."""
    samples = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path, allow_pickle=False) as content:
            size, jpeg_bytes = int(content["codebook_size"]), float(content["jpeg_bytes"])
            samples[path.stem] = Sample(content["codes"], size, content["captions"].tolist(), jpeg_bytes)
    return samples


def keep(samples: dict[str, Sample], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, sample in samples.items():
        np.savez_compressed(folder / f"{name}.npz", **vars(sample))
