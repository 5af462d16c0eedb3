"""Pictures with captions -> a folder of shards.

Each part of the source becomes one shard, whose content does not depend on when and where it is made: a killed run,
started again, makes the missing shards, and any number of machines can share the parts.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.images.files import MAX_PIXELS
from dalle_lean.images.vqgan import VQGAN
from dalle_lean.progress import OnProgress, unwatched
from dalle_lean.words import counted
from preprocessing.encoding import part_records
from preprocessing.encoding.decode_pool import MEMORY_BYTES, MIN_MEMORY_BYTES
from preprocessing.encoding.decoding import Decoding
from preprocessing.encoding.filters import Rules
from preprocessing.encoding.pipeline import EncodingJob, Report, make_parts, shard_name
from preprocessing.shards.manifest import (
    MAX_CODEBOOK_SIZE,
    MAX_IMAGE_SIDE,
    DatasetInfo,
    check_room,
    read_dataset_info,
    write_dataset_info,
)
from preprocessing.sources import Source

MAX_WORKERS = 16  # of the default: this many decode as fast as a GPU encodes

MakeParts = Callable[[EncodingJob, VQGAN, Sequence[int], Report], None]
"""Encodes parts: here, or in other processes and on other machines."""


def preprocess(
    source: Source,
    out: str | Path,
    vqgan: VQGAN,
    *,
    picture_side: int | None = None,
    batch_size: int = 32,
    rules: Rules | None = None,
    max_pixels: int = MAX_PIXELS,
    memory_bytes: int = MEMORY_BYTES,
    crops: int = 1,
    flip: bool = False,
    bf16: bool = False,
    explain: bool = False,
    workers: int | None = None,
    share: tuple[int, int] = (1, 1),
    make: MakeParts | None = make_parts,
    on_progress: OnProgress = unwatched,
) -> DatasetInfo | None:
    """Encode every usable picture of `source` and write the shards and `dataset.json` to `out`.

    These arguments decide what the shards hold: `picture_side` in pixels (the VQGAN's by default), `batch_size` (codes
    of other batch sizes differ by rounding), the filter's `rules`, `max_pixels` of a picture and `memory_bytes` for
    decoding it, `crops` squares of each picture and with `flip` their mirror images, `bf16` to encode in bfloat16,
    `explain` to write `out/rejected.jsonl` with each rejected picture and why (a folder begun with it keeps it).

    The others decide only how the shards are made: `workers` processes decode for each VQGAN; with `share` = (i, n)
    this call makes every n-th part from the i-th on; `make` runs the VQGAN on its device by default, see `ray_data`
    for alternatives. With `make` None the call only gathers: it takes `bf16` from the shards, and raises a UserError
    that names missing parts.

    The same call continues a killed run, and returns at once if the run was finished. Returns None while parts of other
    shares are missing: the call that makes the last part writes `dataset.json`.

    Raises UserError for settings out of range, for an `out` made with other settings, and if no picture was usable;
    OSError if parts of the source could not be read.
    """
    out = Path(out)
    side = vqgan.config.picture_side if picture_side is None else picture_side
    if side < 1 or side % vqgan.config.downscale:
        raise UserError(f"picture_side={side}: must be a positive multiple of {vqgan.config.downscale} pixels")
    if side > (largest := MAX_IMAGE_SIDE * vqgan.config.downscale):
        raise UserError(f"picture_side={side}: must be at most {largest} pixels, {MAX_IMAGE_SIDE} codes along a side")
    if vqgan.config.codebook_size > MAX_CODEBOOK_SIZE:
        raise UserError(f"codebook_size={vqgan.config.codebook_size}: shards hold at most {MAX_CODEBOOK_SIZE} codes")
    positive = {"batch_size": batch_size, "max_pixels": max_pixels, "crops": crops, "workers": workers}
    for name, value in positive.items():
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: must be positive")
    if not 1 <= share[0] <= share[1]:
        raise UserError(f"share={share}: must be (i, n) with i from 1 to n, such as (2, 8)")
    if memory_bytes < MIN_MEMORY_BYTES:
        raise UserError(f"memory_bytes={memory_bytes}: must be at least {MIN_MEMORY_BYTES}")
    if not source.parts:
        raise UserError("the source has no parts: there is nothing to read in it")
    check_room(map(shard_name, source.parts))

    recorded = part_records.recorded_settings(out)
    explain = explain or recorded.get("explain") is True
    decoding = Decoding(side=side, rules=rules or Rules(), max_pixels=max_pixels, crops=crops, flip=flip)
    job = EncodingJob(
        source=source,
        out=out,
        decoding=decoding,
        batch_size=batch_size,
        bf16=bf16,
        explain=explain,
        vqgan=vqgan.codes_fingerprint(),
        workers=workers or min(MAX_WORKERS, os.cpu_count() or 1),
        memory_bytes=memory_bytes,
    )
    settings = settings_of(job)
    if make is None:
        # Often on a machine without the GPUs that made the shards, where the default precision differs.
        if not recorded:
            raise not_made(job, range(len(job.parts)))
        settings["precision"] = recorded.get("precision", settings["precision"])
    if (info := finished(out, settings)) is None:
        try:
            part_records.begin(out, settings)
            missing = job.missing(range(share[0] - 1, len(job.parts), share[1]))
            if missing and finished(out, settings) is None:
                if make is None:
                    raise not_made(job, missing)
                make(job, vqgan, missing, Reporter(source, missing, on_progress))
            info = gather(job, vqgan, settings)
        except (ValueError, FileNotFoundError) as error:
            # Another machine may have gathered and removed the records at any moment.
            if (info := finished(out, settings)) is None:
                if isinstance(error, FileNotFoundError) and not part_records.records_folder(out).exists():
                    raise UserError(
                        f"{out}: its records are gone; another machine found no picture that can be used, or it was "
                        "removed"
                    ) from None
                raise
    if info:
        part_records.remove_leftovers(out)
    return info


def settings_of(job: EncodingJob) -> dict[str, Any]:
    """Everything that affects the folder's content, as JSON."""
    # For sources that are already in shards the fingerprint suffices, and sizes are not always known.
    cut = {"shard_rows": job.source.size(0)} if hasattr(job.source, "part_rows") else {}
    return {
        "source": job.source.fingerprint(),
        "parts": len(job.parts),
        **cut,
        "vqgan": job.vqgan,
        "picture_side": job.decoding.side,
        "precision": "bfloat16" if job.bf16 else "float32",
        "batch_size": job.batch_size,
        **job.decoding.rules.to_dict(),
        "max_pixels": job.decoding.max_pixels,
        "memory_bytes": job.memory_bytes,
        "crops": job.decoding.crops,
        "flip": job.decoding.flip,
        "explain": job.explain,
    }


def finished(out: Path, settings: dict[str, Any]) -> DatasetInfo | None:
    """The finished data set in `out`, None if there is none; UserError if it was made with other settings."""
    if not (out / "dataset.json").exists():
        return None
    info = read_dataset_info(out)
    part_records.refuse_other_settings(out, info.settings, settings)
    return info


def gather(job: EncodingJob, vqgan: VQGAN, settings: dict[str, Any]) -> DatasetInfo | None:
    """Write `dataset.json` if all parts are made. Machines that do so at the same moment write the same bytes.
    FileNotFoundError if another one has just gathered and removed the records."""
    if job.missing(range(len(job.parts))):  # or another machine has gathered and removed their records
        return finished(job.out, settings)
    counts, shards = part_records.gather(job.out, job.parts)
    if job.explain:
        part_records.write_explanations(job.out, job.parts)
    if not counts.kept:
        part_records.remove_leftovers(job.out)
        listed = ", ".join(f"{reason} {count}" for reason, count in counts.rejected.items())
        where = f"{job.out / 'rejected.jsonl'} names each" if job.explain else "--explain names each"
        raise UserError(f"no picture of the source can be used ({listed}); {where}")
    info = DatasetInfo(
        vqgan=job.vqgan,
        image_side=job.decoding.side // vqgan.config.downscale,
        codebook_size=vqgan.config.codebook_size,
        picture_side=job.decoding.side,
        counts=counts,
        shards=shards,
        settings=settings,
    )
    write_dataset_info(job.out, info)
    return info


def not_made(job: EncodingJob, parts: Sequence[int]) -> UserError:
    """The error of a call that only gathers: it names the missing parts."""
    names = [job.parts[part] for part in parts]
    listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return UserError(f"{len(names)} of {len(job.parts)} parts are not made yet: {listed}")


class Reporter:
    """Adds up the progress of all parts: pictures done, and an estimate of how many there are."""

    def __init__(self, source: Source, parts: Sequence[int], on_progress: OnProgress):
        self.sizes = {part: source.size(part) for part in parts}
        self.seen: Counter[int] = Counter()
        self.on_progress = on_progress
        # Totals: adding up all parts at each report could take longer than encoding a batch.
        known = [size for size in self.sizes.values() if size is not None]
        self.known_parts, self.known = len(known), sum(known)
        self.done = self.complete = 0

    def __call__(self, part: int, seen: int, complete: bool) -> None:
        self.done += seen - self.seen[part]
        self.seen[part] = seen
        if complete:
            self.complete += 1
            self.known_parts += self.sizes[part] is None
            self.known += seen - (self.sizes[part] or 0)
            self.sizes[part] = seen
        # Assume the mean of the others for parts of unknown size.
        mean = self.known / self.known_parts if self.known_parts else max(self.seen.values())
        total = self.known + round(mean * (len(self.sizes) - self.known_parts))
        note = f"{self.complete} of {counted(len(self.sizes), 'shard')}"
        self.on_progress(self.done, max(total, self.done), note)
