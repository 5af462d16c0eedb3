"""What does preprocessing add to the bare VQGAN? `python -m benchmarks.preprocessing [DATA] [--vqgan FOLDER|paper]`.

DATA is a folder of pictures with captions (default: the drawings of the tests); if it has too few, they are repeated
with other colours, mirrored, and with other captions. Each phase is measured alone, then all together in turns with the
VQGAN's forward on the same batches. `--rows 100000` also records the memory of a run over this many pictures.
"""

import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from PIL import Image, ImageOps
from torch import Tensor

from benchmarks.report import TEST_PICTURES, make_parser, print_json, print_table
from benchmarks.timing import Timed, in_turns, median_ratio, timed
from dalle_lean.devices import pick_device
from dalle_lean.images.files import open_picture
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.io.model_folder import bundled_model
from preprocessing.encoding.decode_pool import MEMORY_BYTES, DecodePool
from preprocessing.encoding.decoding import Decoding
from preprocessing.encoding.encode import MAX_WORKERS, preprocess
from preprocessing.encoding.pipeline import Batch, Encoder, EncodingJob, prepare
from preprocessing.shards.files import write_shard
from preprocessing.sources import Sample, Source, open_source
from preprocessing.sources.sample import NumberedParts

PART_ROWS = 1024
VARIANTS = [(channels, mirrored) for mirrored in (False, True) for channels in permutations(range(3))]


def main() -> None:
    """Measure, print the tables and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=TEST_PICTURES)
    parser.add_argument("--vqgan", default=str(bundled_model() / "vqgan"), help="folder, or paper: f=8, 256 pixels")
    parser.add_argument("--pictures", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=min(MAX_WORKERS, os.cpu_count() or 1))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--turns", type=int, default=3, help="of the VQGAN alone and of all together")
    parser.add_argument("--rows", type=int, default=0, help="pictures of a run that records its memory; 0 for none")
    options = parser.parse_args()
    device = pick_device(options.device)
    torch.manual_seed(0)
    vqgan = VQGAN(VQGANConfig()) if options.vqgan == "paper" else VQGAN.load(options.vqgan)
    vqgan = vqgan.to(device).eval()
    settings = {"batch_size": options.batch_size, "workers": options.workers, "bf16": options.bf16}
    with tempfile.TemporaryDirectory() as folder:
        source = VariedFolder(options.data, options.pictures)
        figures = phases(source, vqgan, Path(folder), turns=options.turns, **settings)
        rates = figures["pictures_per_s"].items()
        print_table(("phase", "pictures/s"), [(name, f"{rate:.1f}") for name, rate in rates])
        print(f"\nover the bare VQGAN: {100 * figures['overhead']:+.1f} %")
        if device.type == "cpu":
            cpu_ms = figures["cpu_ms"]
            print(
                f"decoding takes {cpu_ms['decoding']:.2f} ms of processor time per picture, the VQGAN "
                f"{cpu_ms['VQGAN']:.2f} ms; if the VQGAN fills every core, the overhead is at least "
                f"{100 * figures['least_overhead']:.1f} %"
            )
        print()
        if options.rows:
            many = VariedFolder(options.data, options.rows)
            figures["memory"] = memory(many, vqgan, Path(folder) / "many", **settings)
            peaks = figures["memory"]["peak_mb_of_each_tenth"]
            print_table(("tenth of the rows", "peak memory, MB"), list(enumerate(peaks, start=1)))
    print_json("preprocessing", {"vqgan": options.vqgan, "device": device.type, **settings, **figures})


def phases(
    source: Source, vqgan: VQGAN, folder: Path, *, batch_size: int, workers: int, bf16: bool, turns: int
) -> dict[str, Any]:
    """Pictures per second of each phase alone and of all together, and the overhead over the VQGAN alone.

    "least_overhead" is that of a CPU whose cores the VQGAN fills, so that decoding takes its time from it.
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
    samples, read_s, _ = timed(lambda: [sample for part in parts for sample in source.samples(part)])
    decoding_cpu_s = timed(lambda: [job.decoding(sample) for sample in samples]).cpu_s
    with DecodePool(job.decoding, workers, MEMORY_BYTES) as pool:
        list(pool.map(samples[: 4 * workers]))  # starts the processes
        decode_s = timed(lambda: list(pool.map(samples))).wall_s
        batches = [event for event in prepare(job, pool, parts, pinned=False) if isinstance(event, Batch)]

    def bare() -> Timed[list[Tensor]]:
        with Encoder(vqgan, batch_size, job.decoding.side, bf16) as encoder:
            encode(encoder, batches[: encoder.at_once])
            return timed(lambda: encode(encoder, batches))

    def whole() -> Timed[Any]:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            shards = Path(out) / "shards"
            return timed(lambda: preprocess(source, shards, vqgan, batch_size=batch_size, workers=workers, bf16=bf16))

    found = in_turns({"VQGAN alone": bare, "all together": whole}, turns)
    alone, together = found["VQGAN alone"], found["all together"]
    rows = [
        row(codes=codes)
        for batch, rows_of_codes in zip(batches, alone[0].result, strict=True)
        for row, codes in zip(batch.rows, rows_of_codes.numpy(), strict=False)
    ]
    seconds = {
        "read": read_s,
        "decode": decode_s,
        "VQGAN alone": median(turn.wall_s for turn in alone),
        "write": timed(lambda: write_shard(folder / "written.parquet", rows)).wall_s,
        "all together": median(turn.wall_s for turn in together),
    }
    cpu_s = {"decoding": decoding_cpu_s, "VQGAN": median(turn.cpu_s for turn in alone)}
    return {
        "pictures": len(samples),
        "pictures_per_s": {name: len(samples) / value for name, value in seconds.items()},
        "overhead": median_ratio([turn.wall_s for turn in together], [turn.wall_s for turn in alone]) - 1,
        "cpu_ms": {name: 1000 * value / len(samples) for name, value in cpu_s.items()},
        "least_overhead": cpu_s["decoding"] / cpu_s["VQGAN"],
    }


def encode(encoder: Encoder, batches: Sequence[Batch]) -> list[Tensor]:
    """The VQGAN's forward, including the transfer of pictures to the device."""
    begun = [encoder.start(batch.pixels) for batch in batches]
    return [codes.result().cpu() for codes in begun]


def memory(source: Source, vqgan: VQGAN, out: Path, *, batch_size: int, workers: int, bf16: bool) -> dict[str, Any]:
    """The peak memory of this process and its workers in each tenth of a run."""
    peaks = [0] * 10

    def watch(done: int, total: int, note: str) -> None:
        tenth = min(9, 10 * (done - 1) // total)
        peaks[tenth] = max(peaks[tenth], resident_bytes())

    info, seconds, _ = timed(
        lambda: preprocess(source, out, vqgan, batch_size=batch_size, workers=workers, bf16=bf16, on_progress=watch)
    )
    assert info is not None, "all parts were preprocessed here"
    return {
        "rows": info.counts.seen,
        "pictures_per_s": info.counts.seen / seconds,
        "peak_mb_of_each_tenth": [round(peak / 1e6) for peak in peaks],
    }


def resident_bytes() -> int:
    """Resident memory of this process and its children."""
    process = psutil.Process()
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


class VariedFolder(NumberedParts):
    """A folder's pictures, repeated with variations up to `num_rows` rows."""

    def __init__(self, folder: Path, num_rows: int):
        super().__init__(num_rows, PART_ROWS)
        self.folder = folder

    @cached_property
    def pictures(self) -> list[Sample]:
        source = open_source(self.folder, PART_ROWS)
        found = [sample for part in range(len(source.parts)) for sample in source.samples(part) if not sample.problem]
        return found[: self.num_samples]

    def samples(self, part: int) -> Iterator[Sample]:
        for row in self.rows(part):
            repeat, index = divmod(row, len(self.pictures))
            found, variant = self.pictures[index], repeat % len(VARIANTS)
            picture = varied(found.picture, variant) if variant else found.picture
            yield Sample(key=f"{row}", caption=f"{found.caption}, {repeat}", picture=picture, metadata=found.metadata)

    def fingerprint(self) -> str:
        return f"{open_source(self.folder, PART_ROWS).fingerprint()} {self.num_samples}"


@cache
def varied(picture: bytes, variant: int) -> bytes:
    """A picture's file with its colour channels permuted, and mirrored in half of the variants."""
    channels, mirrored = VARIANTS[variant]
    image = open_picture(picture).convert("RGB")
    image = Image.merge("RGB", [image.split()[channel] for channel in channels])
    file = io.BytesIO()
    (ImageOps.mirror(image) if mirrored else image).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    main()
