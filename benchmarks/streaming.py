"""How fast do shards become batches, phase by phase, in how much memory, and how long does resuming take?

    python -m benchmarks.streaming [--rows 98304] [--shard-rows 4096] [--folder DIR]

Synthetic shards of the paper's sizes, written as `preprocess` writes them: captions of 3 to 40 words out of 20,000 with
the frequencies of natural words (Zipf); codes out of 8192, some far more frequent than others, one in eight repeating
the one before it.
"""

import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet

from benchmarks.report import Column, make_parser, print_figures, print_json, print_table
from benchmarks.timing import timed
from dalle_lean.tokenizer import Tokenizer
from preprocessing.shards.files import Row, write_shard
from preprocessing.shards.manifest import Counts, DatasetInfo, write_dataset_info
from training.data.catalog import ShardSet, find_shards
from training.data.loader import TrainingData, collate
from training.data.reader import read_rows
from training.data.sampler import Position, shard_groups
from training.run.recipe import DataRecipe

IMAGE_SIDE, CODEBOOK_SIZE = 32, 8192
TEXT_LEN, TEXT_VOCAB_SIZE = 256, 32100
WORDS = 20_000
MEMORY_SAMPLES = 20


def captions(count: int, random: np.random.Generator) -> list[str]:
    """Captions of made-up words with Zipf frequencies."""
    letters = np.array(list("etaoinshrdlucmfwygpbvk"))
    words = ["".join(random.choice(letters, length)) for length in random.integers(2, 11, WORDS)]
    frequency = 1 / np.arange(1, WORDS + 1)
    lengths = np.clip(random.lognormal(2.2, 0.5, count).astype(int), 3, 40)
    drawn = random.choice(WORDS, lengths.sum(), p=frequency / frequency.sum())
    return [" ".join(words[word] for word in part) for part in np.split(drawn, np.cumsum(lengths)[:-1])]


def codes(count: int, random: np.random.Generator) -> np.ndarray:
    """int16 [count, I]; one in eight repeats the code before it."""
    drawn = (CODEBOOK_SIZE * random.beta(0.7, 1.5, (count, IMAGE_SIDE**2))).astype(np.int16)
    again = random.random(drawn.shape) < 1 / 8
    again[:, 0] = False
    place = np.where(again, 0, np.arange(IMAGE_SIDE**2))
    return np.take_along_axis(drawn, np.maximum.accumulate(place, axis=1), axis=1)


def write_shards(folder: Path, rows: int, shard_rows: int) -> None:
    """Write a finished output of `preprocess` with `rows` synthetic rows."""
    random = np.random.default_rng(0)
    shards = []
    folder.mkdir(parents=True)
    for number, first in enumerate(range(0, rows, shard_rows)):
        count = min(shard_rows, rows - first)
        content = [
            Row(
                caption=caption,
                codes=picture,
                nsfw="UNLIKELY",
                original_width=640,
                original_height=480,
                url=f"https://example.com/pictures/{first + place}.jpg",
                key=f"{first + place:09d}",
            )
            for place, (caption, picture) in enumerate(zip(captions(count, random), codes(count, random), strict=True))
        ]
        shards.append(write_shard(folder / f"{number:05d}.parquet", content))
    info = DatasetInfo(
        vqgan="0" * 64,
        image_side=IMAGE_SIDE,
        codebook_size=CODEBOOK_SIZE,
        picture_side=8 * IMAGE_SIDE,
        counts=Counts(seen=rows, kept=rows),
        shards=tuple(shards),
    )
    write_dataset_info(folder, info)


def measure_rate(counts: Iterator[int], rows: int) -> dict[str, float]:
    """Samples per second over `rows` rows after a warm-up, and the processor time of one in all threads, which depends
    less on what else the machine does."""

    def count() -> int:
        done = 0
        while done < rows:
            done += next(counts)
        return done

    next(counts)
    done, wall_s, cpu_s = timed(count)
    return {"samples_per_s": done / wall_s, "cpu_us": 1e6 * cpu_s / done}


def raw_reads(shards: ShardSet) -> Iterator[int]:
    """Decompress the columns with Parquet and Brotli alone."""
    for path in shards.paths:
        with pyarrow.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            yield from map(len, file.iter_batches(batch_size=1024, columns=["caption", "code", "key"]))


def phases(data: TrainingData, tokenizer: Tokenizer, batch_size: int, rows: int) -> dict[str, dict[str, float]]:
    """The rate of each phase by itself, in one Python thread."""
    window = next(part for part, _ in data.windows(Position(window=1)))
    text = window.captions
    starts = range(0, len(text) - batch_size + 1, batch_size)

    def decoded() -> Iterator[int]:
        for number in range(len(data.shards.paths)):
            yield from map(len, read_rows(data.shards, number, 0, 1024))

    def tokenized() -> Iterator[int]:
        return (len(tokenizer.encode(text[start : start + batch_size], TEXT_LEN)) for start in starts)

    def collated() -> Iterator[int]:
        return (len(collate(window.part(start, start + batch_size), tokenizer, TEXT_LEN).text_ids) for start in starts)

    return {
        "read (Parquet, Brotli)": measure_rate(repeated(lambda: raw_reads(data.shards)), rows),
        "read and decode codes": measure_rate(repeated(decoded), rows),
        "and shuffle, leave out the held-out": measure_rate((len(part) for part, _ in data.windows()), rows),
        "tokenize": measure_rate(repeated(tokenized), rows),
        "tokenize and collate": measure_rate(repeated(collated), rows),
    }


def repeated(counts: Callable[[], Iterator[int]]) -> Iterator[int]:
    """Start over whenever the counts end."""
    while True:
        yield from counts()


def stream(data: TrainingData, tokenizer: Tokenizer, batch_size: int, rows: int, *, made_ahead: bool) -> dict[str, Any]:
    """The rate of the whole stream, and the resident memory of this process on the way."""
    batches: Any = data.batches(batch_size, tokenizer, TEXT_LEN)
    if made_ahead:
        batches = data.ahead(batches)
    resident: list[int] = []
    # The warm-up lets allocators take their memory.
    for _ in islice(batches, max(1, data.recipe.shuffle_buffer // batch_size)):
        pass

    def counted() -> Iterator[int]:
        done = 0
        for batch, _ in batches:
            done += len(batch.text_ids)
            if done * MEMORY_SAMPLES >= rows * len(resident):
                resident.append(psutil.Process().memory_info().rss)
            yield len(batch.text_ids)

    rate = measure_rate(counted(), rows)
    batches.close()
    return {"pace": rate, "rows": rows, "resident_bytes": resident}


def resume_s(data: TrainingData, tokenizer: Tokenizer, batch_size: int, position: Position) -> float:
    """Seconds to the first batch after `position`."""
    return timed(lambda: next(data.batches(batch_size, tokenizer, TEXT_LEN, position))).wall_s


def measure(folder: Path, batch_size: int = 1024, shuffle_buffer: int = 10_000) -> dict[str, Any]:
    """All figures for the shards in a folder."""
    shards = find_shards(folder)
    rows = shards.info.counts.kept
    data = TrainingData(shards, DataRecipe(shuffle_buffer=shuffle_buffer))
    tokenizer = Tokenizer.train(islice(data.captions(), 20_000), TEXT_VOCAB_SIZE)
    found: dict[str, Any] = {"rows": rows, "batch_size": batch_size, "shuffle_buffer": shuffle_buffer}
    found["file_bytes_per_row"] = round(sum(Path(path).stat().st_size for path in shards.paths) / rows)
    found["ids_per_caption"] = float(np.mean([tokenizer.count(text) for text in islice(data.captions(), 2000)]))
    found["phases"] = phases(data, tokenizer, batch_size, rows // 4)
    found["stream"] = stream(data, tokenizer, batch_size, rows, made_ahead=False)
    found["stream_ahead"] = stream(data, tokenizer, batch_size, rows, made_ahead=True)
    groups = shard_groups(len(shards.paths), data.recipe.shuffle_shards, data.order_seed, 7)
    windows = min(row or 0 for row in shards.rows) * len(groups[-1]) // shuffle_buffer
    places = {"beginning": Position(), "deep": Position(epoch=7, group=len(groups) - 1, window=windows, sample=1)}
    found["resume_s"] = {name: resume_s(data, tokenizer, batch_size, place) for name, place in places.items()}
    found["reading_a_pass_again_s"] = rows / found["phases"]["and shuffle, leave out the held-out"]["samples_per_s"]
    return found


def report(found: dict[str, Any]) -> None:
    """Print the tables."""
    rates = {**found["phases"], "whole stream": found["stream"]["pace"]}
    rates["whole stream, batches made ahead of need"] = found["stream_ahead"]["pace"]
    columns = (
        Column("phase", "phase"),
        Column("samples/s", "samples_per_s", ",.0f"),
        Column("processor time of a sample, us", "cpu_us", ".1f"),
    )
    print_figures([{"phase": name, **rate} for name, rate in rates.items()], columns)
    resident = [f"{size / 2**20:,.0f} MiB" for size in found["stream_ahead"]["resident_bytes"]]
    print()
    rows = {
        f"resident memory at the start of {found['rows']:,} rows": resident[0],
        "in the middle": resident[len(resident) // 2],
        "at their end": resident[-1],
        "first batch from the beginning": f"{found['resume_s']['beginning']:.2f} s",
        "first batch after 7 passes and a good part of the 8th": f"{found['resume_s']['deep']:.2f} s",
        "one pass, if it were read again": f"{found['reading_a_pass_again_s']:.1f} s",
    }
    print_table(["", "value"], list(rows.items()))


def main() -> None:
    """Write shards, measure, print the tables and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=98_304)
    parser.add_argument("--shard-rows", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where to keep the shards; an earlier run's are reused")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "shards"
        if not (folder / "dataset.json").exists():
            write_shards(folder, options.rows, options.shard_rows)
        found = measure(folder)
    report(found)
    print_json("streaming", found)


if __name__ == "__main__":
    main()
