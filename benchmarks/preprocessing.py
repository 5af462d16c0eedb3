"""What does preprocessing add to the bare VQGAN? `python -m benchmarks.preprocessing [DATA] [--vqgan FOLDER|paper]`.

DATA is a folder of pictures with captions (default: the drawings of the tests); where it has too few, they are repeated
with other colours, mirrored, and with other captions. Each phase is measured alone, then all of them together against
the VQGAN's forward on the same batches, in turns. `--rows 100000` watches the memory of a run of so many pictures.
"""

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor

from benchmarks.report import print_json, print_table
from dalle_lean.devices import pick_device
from dalle_lean.images.files import open_picture
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.io.model_folder import bundled_model
from preprocessing.encoding.batches import Batch
from preprocessing.encoding.decode_pool import MEMORY_BYTES, DecodePool
from preprocessing.encoding.decoding import Decoding
from preprocessing.encoding.encode import MAX_WORKERS, preprocess
from preprocessing.encoding.pipeline import Encoder, EncodingJob, prepare, samples_of
from preprocessing.shards.files import write_shard
from preprocessing.sources import Sample, Source, open_source

TEST_PICTURES = Path(__file__).parent.parent / "tests" / "data" / "emoji"
PART_ROWS = 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
VARIANTS = [(channels, mirrored) for mirrored in (False, True) for channels in permutations(range(3))]


def main() -> None:
    """Measure, print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=TEST_PICTURES)
    parser.add_argument("--vqgan", default=str(bundled_model() / "vqgan"), help="folder, or paper: f=8, 256 pixels")
    parser.add_argument("--pictures", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=min(MAX_WORKERS, os.cpu_count() or 1))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--turns", type=int, default=3, help="of the VQGAN alone and of everything together")
    parser.add_argument("--rows", type=int, default=0, help="pictures of the run whose memory is watched; 0 for none")
    options = parser.parse_args()

    device = pick_device(options.device)
    torch.manual_seed(0)
    vqgan = VQGAN(VQGANConfig()) if options.vqgan == "paper" else VQGAN.load(options.vqgan)
    vqgan = vqgan.to(device).eval()
    choices = {"batch_size": options.batch_size, "workers": options.workers, "bf16": options.bf16}
    with tempfile.TemporaryDirectory() as folder:
        source = VariedFolder(options.data, options.pictures)
        figures = phases(source, vqgan, Path(folder), turns=options.turns, **choices)
        print_table(
            ("phase", "pictures/s"), [(name, f"{rate:.1f}") for name, rate in figures["pictures_per_s"].items()]
        )
        print(f"\nover the bare VQGAN: {100 * figures['overhead']:+.1f} %")
        if device.type == "cpu":
            cpu_ms = figures["cpu_ms"]
            print(
                f"decoding alone: {cpu_ms['decoding']:.2f} ms of processor time a picture, the VQGAN: "
                f"{cpu_ms['VQGAN']:.2f}; where that fills every core, the overhead cannot be below "
                f"{100 * figures['least_overhead']:.1f} %"
            )
        print()
        if options.rows:
            many = VariedFolder(options.data, options.rows)
            figures["memory"] = memory(many, vqgan, Path(folder) / "many", **choices)
            rows = figures["memory"]["peak_mb_of_each_tenth"]
            print_table(("tenth of the rows", "peak memory, MB"), list(enumerate(rows, start=1)))
    print_json("preprocessing", {"vqgan": options.vqgan, "device": device.type, **choices, **figures})


def phases(
    source: Source, vqgan: VQGAN, folder: Path, *, batch_size: int, workers: int, bf16: bool, turns: int
) -> dict[str, Any]:
    """Pictures a second of each phase alone and of all together, and what all take beyond the VQGAN alone.

    "least_overhead" is for a CPU of which the VQGAN fills every core, where decoding must take its time from it.
    """
    parts = range(len(source.parts))
    job = EncodingJob(
        source=source,
        out=folder,
        decoding=Decoding(side=vqgan.config.picture_side),
        batch_size=batch_size,
        bf16=bf16,
        explain=False,
        vqgan="",
        workers=workers,
        memory_bytes=MEMORY_BYTES,
    )
    samples, read_s = timed(lambda: [one for one in samples_of(source, parts) if isinstance(one, Sample)])
    cpu_s = {"decoding": processor_s(lambda: [job.decoding(sample) for sample in samples])[1]}
    with DecodePool(job.decoding, workers, MEMORY_BYTES) as pool:
        list(pool.map(samples[: 4 * workers]))  # starts the processes
        _, decode_s = timed(lambda: list(pool.map(samples)))
        events = list(prepare(job, pool, parts, pinned=False))
    batches = [event for event in events if isinstance(event, Batch)]

    bare_s, bare_cpu_s, whole_s = [], [], []
    for turn in range(turns):
        with Encoder(vqgan, batch_size, job.decoding.side, bf16) as encoder:
            bare(encoder, batches[: encoder.at_once])
            (codes, cpu), seconds = timed(lambda encoder=encoder: processor_s(lambda: bare(encoder, batches)))
        bare_s.append(seconds)
        bare_cpu_s.append(cpu)
        out = folder / f"turn{turn}"
        choices = {"batch_size": batch_size, "workers": workers, "bf16": bf16}
        info, seconds = timed(lambda out=out, choices=choices: preprocess(source, out, vqgan, **choices))
        assert info is not None
        whole_s.append(seconds)
    rows = [
        row(codes=codes)
        for batch, rows_of_codes in zip(batches, codes, strict=True)
        for row, codes in zip(batch.rows, rows_of_codes.numpy(), strict=False)
    ]
    _, write_s = timed(lambda: write_shard(folder / "written.parquet", rows))
    seconds = {
        "read": read_s,
        "decode": decode_s,
        "VQGAN alone": statistics.median(bare_s),
        "write": write_s,
        "all together": statistics.median(whole_s),
    }
    cpu_s["VQGAN"] = statistics.median(bare_cpu_s)
    return {
        "pictures": len(samples),
        "pictures_per_s": {name: len(samples) / value for name, value in seconds.items()},
        "overhead": statistics.median(whole / alone for whole, alone in zip(whole_s, bare_s, strict=True)) - 1,
        "cpu_ms": {name: 1000 * value / len(samples) for name, value in cpu_s.items()},
        "least_overhead": cpu_s["decoding"] / cpu_s["VQGAN"],
    }


def bare(encoder: Encoder, batches: Sequence[Batch]) -> list[Tensor]:
    """The VQGAN's forward and nothing else, but for putting pictures on the device."""
    begun = [encoder.start(batch.pixels) for batch in batches]
    return [codes.result().cpu() for codes in begun]


def memory(source: Source, vqgan: VQGAN, out: Path, *, batch_size: int, workers: int, bf16: bool) -> dict[str, Any]:
    """The peak memory of this process with its workers over each tenth of the rows of a run."""
    peaks = [0] * 10

    def watch(done: int, total: int, note: str) -> None:
        tenth = min(9, 10 * (done - 1) // total)
        peaks[tenth] = max(peaks[tenth], resident_bytes())

    info, seconds = timed(
        lambda: preprocess(source, out, vqgan, batch_size=batch_size, workers=workers, bf16=bf16, on_progress=watch)
    )
    assert info is not None
    return {
        "rows": info.counts.seen,
        "pictures_per_s": info.counts.seen / seconds,
        "peak_mb_of_each_tenth": [round(peak / 1e6) for peak in peaks],
    }


def timed(work: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started


def processor_s(work: Any) -> tuple[Any, float]:
    """As `timed`, in seconds of this process on any core."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def resident_bytes() -> int:
    """Memory of this process and of those it started."""
    processes = [os.getpid()]
    for process in processes:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            processes += map(int, task.read_text().split())
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes) * PAGE_BYTES


@dataclass(frozen=True)
class VariedFolder:
    """A folder's pictures, repeated with variations until there are `rows`."""

    folder: Path
    rows: int

    @cached_property
    def pictures(self) -> list[Sample]:
        source = open_source(self.folder, PART_ROWS)
        found = [sample for part in range(len(source.parts)) for sample in source.samples(part) if not sample.problem]
        return found[: self.rows]

    @cached_property
    def variants(self) -> dict[tuple[int, int], bytes]:
        """Made when they are first needed."""
        return {}

    @property
    def parts(self) -> list[str]:
        return [f"{part:05d}" for part in range(-(-self.rows // PART_ROWS))]

    def size(self, part: int) -> int:
        return min(PART_ROWS, self.rows - part * PART_ROWS)

    def samples(self, part: int) -> Iterator[Sample]:
        for row in range(part * PART_ROWS, part * PART_ROWS + self.size(part)):
            repeat, index = divmod(row, len(self.pictures))
            found, variant = self.pictures[index], repeat % len(VARIANTS)
            picture = found.picture if variant == 0 else self.varied(index, variant)
            yield Sample(key=f"{row}", caption=f"{found.caption}, {repeat}", picture=picture, metadata=found.metadata)

    def varied(self, index: int, variant: int) -> bytes:
        """The picture with its colours exchanged and perhaps mirrored."""
        if (index, variant) not in self.variants:
            channels, mirrored = VARIANTS[variant]
            image = open_picture(self.pictures[index].picture).convert("RGB")
            image = Image.merge("RGB", [image.split()[channel] for channel in channels])
            file = io.BytesIO()
            (ImageOps.mirror(image) if mirrored else image).save(file, "PNG")
            self.variants[index, variant] = file.getvalue()
        return self.variants[index, variant]

    def fingerprint(self) -> str:
        return f"{open_source(self.folder, PART_ROWS).fingerprint()} {self.rows}"


if __name__ == "__main__":
    main()
