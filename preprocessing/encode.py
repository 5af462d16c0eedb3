"""The walk from a source to a folder of shards: filter, decode and crop, encode, write.

One part of the source becomes one shard, so what a shard holds does not depend on when it was made: a killed run,
started again, makes the shards that are missing.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dalle_lean.pictures import MAX_PIXELS, UnusablePicture, open_picture, quiet_pillow, square_pixels
from dalle_lean.progress import OnProgress
from dalle_lean.vqgan import VQGAN
from preprocessing.filters import MAX_ASPECT_RATIO, MIN_CAPTION_LENGTH, reject_reason, text_reject_reason
from preprocessing.progress import (
    Rejection,
    begin,
    gather,
    is_finished,
    note_path,
    refuse_other_settings,
    remove_traces,
    write_note,
)
from preprocessing.shards import (
    MAX_CODEBOOK_SIZE,
    DatasetInfo,
    Row,
    read_dataset_info,
    write_dataset_info,
    write_shard,
)
from preprocessing.sources import Sample, Source, utf8

MAX_SIDE = 2**31 - 1  # shards hold sizes as int32
In = TypeVar("In")
Out = TypeVar("Out")


@dataclass(frozen=True)
class Candidate:
    """A sample that passed the filter, with its pixels [side, side, 3] and its original size."""

    sample: Sample
    pixels: NDArray[np.uint8]
    width: int
    height: int


def preprocess(
    source: Source,
    out: str | Path,
    vqgan: VQGAN,
    *,
    picture_side: int | None = None,
    batch_size: int = 32,
    max_pixels: int = MAX_PIXELS,
    bf16: bool = False,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> DatasetInfo:
    """Encode every usable picture of `source` on the VQGAN's device and write the shards and `dataset.json` to `out`.

    `picture_side` is in pixels (the VQGAN's own by default), `max_pixels` refuses larger pictures, `workers` threads
    decode while the VQGAN encodes. `out/rejected.jsonl` names each picture that was left out, with the reason.
    The same call continues a run that was killed, and returns at once where it was finished.

    Raises ValueError for settings out of range, for an `out` made with other settings, and where nothing was usable.
    """
    out = Path(out)
    side = vqgan.config.picture_side if picture_side is None else picture_side
    if side < 1 or side % vqgan.config.downscale:
        raise ValueError(f"picture_side={side}: must be a positive multiple of {vqgan.config.downscale} pixels")
    if vqgan.config.codebook_size > MAX_CODEBOOK_SIZE:
        raise ValueError(f"codebook_size={vqgan.config.codebook_size}: shards hold at most {MAX_CODEBOOK_SIZE} codes")
    for name, value in {"batch_size": batch_size, "max_pixels": max_pixels, "workers": workers}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be positive")

    settings = {
        "source": source.fingerprint(),
        "shard_rows": max(source.size(part) or 0 for part in range(len(source.parts))),
        "vqgan": vqgan.fingerprint(),
        "picture_side": side,
        "precision": "bfloat16" if bf16 else "float32",
        "min_caption_length": MIN_CAPTION_LENGTH,
        "max_aspect_ratio": MAX_ASPECT_RATIO,
        "max_pixels": max_pixels,
    }
    if (out / "dataset.json").exists():
        info = read_dataset_info(out)
        refuse_other_settings(out, info.settings, settings)
    else:
        begin(out, settings)
        encode = partial(encode_batch, vqgan, bf16=bf16)
        decode = partial(decode_sample, side=side, max_pixels=max_pixels)
        make_shards(source, out, decode, encode, batch_size, workers, on_progress or (lambda done, total, note: None))
        counts, shards = gather(out, len(source.parts))
        info = DatasetInfo(
            vqgan=vqgan.fingerprint(),
            image_side=side // vqgan.config.downscale,
            codebook_size=vqgan.config.codebook_size,
            picture_side=side,
            counts=counts,
            shards=shards,
            settings=settings,
        )
        write_dataset_info(out, info)
    remove_traces(out)
    return info


def make_shards(
    source: Source,
    out: Path,
    decode: Callable[[Sample], Candidate | Rejection],
    encode: Callable[[Sequence[Candidate]], list[Row]],
    batch_size: int,
    workers: int | None,
    on_progress: OnProgress,
) -> None:
    """Make the shard and the note of every part that is not finished. Progress counts the pictures of this call."""
    missing = [part for part in range(len(source.parts)) if not is_finished(out, part)]
    total, done = sum(source.size(part) or 0 for part in missing), 0
    pool = ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1), thread_name_prefix="decode")
    try:
        with quiet_pillow():
            for part in missing:
                rows: list[Row] = []
                rejections: list[Rejection] = []
                decoded = prefetch(pool, decode, source.samples(part), depth=2 * batch_size)
                candidates = keep_candidates(decoded, rejections)
                while batch := list(islice(candidates, batch_size)):
                    rows += encode(batch)
                    on_progress(done + len(rows) + len(rejections), total, "")
                done += len(rows) + len(rejections)
                on_progress(done, total, "")
                shard = write_shard(out / f"shard-{part:05d}.parquet", rows) if rows else None
                write_note(note_path(out, part), shard, rejections)
    finally:
        pool.shutdown(cancel_futures=True)


def decode_sample(sample: Sample, side: int, max_pixels: int) -> Candidate | Rejection:
    """Apply the filter and turn the bytes into pixels. Nothing is decoded for a picture that the filter rejects."""
    if sample.problem:
        return Rejection(sample.key, sample.problem)
    nsfw = optional_text(sample.metadata.get("NSFW"))
    if reason := text_reject_reason(sample.caption, nsfw):
        return Rejection(sample.key, reason)
    try:
        image = open_picture(sample.picture, max_pixels)
        width = original_size(sample.metadata.get("original_width"), image.width)
        height = original_size(sample.metadata.get("original_height"), image.height)
        if reason := reject_reason(sample.caption, nsfw, width, height):
            return Rejection(sample.key, reason, f"{width}x{height} pixels")
        return Candidate(sample, square_pixels(image, side), width, height)
    except UnusablePicture as error:
        return Rejection(sample.key, error.reason, str(error))


@torch.inference_mode()
def encode_batch(vqgan: VQGAN, batch: Sequence[Candidate], bf16: bool) -> list[Row]:
    device = next(vqgan.parameters()).device
    pixels = torch.from_numpy(np.stack([candidate.pixels for candidate in batch])).to(device)
    images = pixels.permute(0, 3, 1, 2).float() / 255
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        codes = vqgan.encode(images).to("cpu", torch.int16).numpy()
    return [make_row(candidate, row) for candidate, row in zip(batch, codes, strict=True)]


def make_row(candidate: Candidate, codes: NDArray[np.int16]) -> Row:
    sample = candidate.sample
    return Row(
        caption=sample.caption or "",
        codes=codes,
        nsfw=optional_text(sample.metadata.get("NSFW")),
        original_width=candidate.width,
        original_height=candidate.height,
        url=optional_text(sample.metadata.get("url")),
        key=sample.key,
    )


def original_size(claimed: Any, actual: int) -> int:
    """A side in pixels as the metadata claims it, else the picture's own; 0 for a claim that is no size."""
    if claimed is None:
        return actual
    if isinstance(claimed, int | float) and 0 < claimed <= MAX_SIDE:
        return int(claimed)
    return 0


def optional_text(value: Any) -> str | None:
    return None if value is None or value == "" else utf8(str(value))


def prefetch(pool: ThreadPoolExecutor, function: Callable[[In], Out], items: Iterable[In], depth: int) -> Iterator[Out]:
    """`map` in the pool's threads, in order, at most `depth` items ahead of the consumer."""
    waiting: deque[Future[Out]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > depth:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def keep_candidates(decoded: Iterable[Candidate | Rejection], rejections: list[Rejection]) -> Iterator[Candidate]:
    """Pass the candidates on and collect the rejections."""
    for result in decoded:
        if isinstance(result, Rejection):
            rejections.append(result)
        else:
            yield result
