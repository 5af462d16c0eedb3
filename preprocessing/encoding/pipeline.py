"""The steps of a part: read, decode and crop, encode, write. All run at the same time, so the VQGAN never waits.

A shard's content depends on its part alone: each part is encoded in batches of one fixed size, the last one padded,
because convolutions round differently for batches of other sizes.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dalle_lean.images.vqgan import VQGAN
from dalle_lean.precision import autocast
from preprocessing.encoding.decode_pool import DecodePool
from preprocessing.encoding.decoding import Candidate, Decoding, Rejection
from preprocessing.encoding.duplicates import NearDuplicates
from preprocessing.encoding.part_records import is_finished, records_folder, write_record
from preprocessing.shards.files import Row, write_shard
from preprocessing.sources import Sample, Source

BATCHES_AHEAD = 2
SHARDS_BEHIND = 4  # written at once: one core compresses some 200 rows of 1024 codes a second, a GPU makes more
SIDE_BY_SIDE_BYTES = 2**28  # limit for the widest layers of all batches that a CPU encodes at the same time

Report = Callable[[int, int, bool], None]
"""Called with (part, number of its samples that are done, whether these are all)."""
PendingRow = partial[Row]  # a row that lacks only `codes=`
T = TypeVar("T")


def no_report(part: int, seen: int, complete: bool) -> None:
    """A Report for callers that want none."""


@dataclass(frozen=True, kw_only=True)
class EncodingJob:
    """How to encode a source, for any process on any machine that can reach the source and the output."""

    source: Source
    out: Path
    decoding: Decoding
    batch_size: int
    bf16: bool
    explain: bool
    vqgan: str  # fingerprint, stored in each shard
    workers: int  # decoding processes
    memory_bytes: int  # what each may allocate for a picture

    @cached_property
    def parts(self) -> Sequence[str]:
        """The names of the source's parts, computed once: there can be very many."""
        return self.source.parts

    def missing(self, parts: Iterable[int]) -> list[int]:
        """Those of the parts that are not finished."""
        return [part for part in parts if not is_finished(self.out, self.parts[part])]


class Encoder:
    """The VQGAN's encoder, on the VQGAN's device.

    On a CPU, small batches are encoded side by side, each on its own cores: threads that share a batch wait for each
    other at every layer, and longest when decoding takes a core from one of them.
    """

    def __init__(self, vqgan: VQGAN, batch_size: int, picture_side: int, bf16: bool):
        self.vqgan = vqgan.eval()
        self.device = next(vqgan.parameters()).device
        self.bf16 = bf16
        self.at_once = 1
        self.torch_threads = torch.get_num_threads()  # of this process, and of threads that start later
        if self.device.type == "cpu":
            widest_bytes = 4 * vqgan.config.channels * batch_size * picture_side**2
            self.at_once = min(self.torch_threads, max(1, SIDE_BY_SIDE_BYTES // widest_bytes))

    def __enter__(self) -> Self:
        share_cores = partial(torch.set_num_threads, self.torch_threads // self.at_once) if self.at_once > 1 else None
        self.threads = ThreadPoolExecutor(self.at_once, thread_name_prefix="encode", initializer=share_cores)
        return self

    def __exit__(self, *exception: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        torch.set_num_threads(self.torch_threads)

    def start(self, pixels: Tensor) -> Future[Tensor]:
        """Like `encode`, in the background."""
        return self.threads.submit(self.encode, pixels)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels, uint8 [B, side, side, 3], -> codes, int16 [B, I], on the device; does not wait for a GPU."""
        images = pixels.to(self.device, non_blocking=True).permute(0, 3, 1, 2).float() / 255
        with (
            # The same kernels in every process; on a GPU float32 means float32.
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
            if self.device.type == "cuda"
            else nullcontext(),
            autocast(self.device.type, "bf16" if self.bf16 else "fp32"),
        ):
            return self.vqgan.most_likely_codes(images).to(torch.int16)


@dataclass(frozen=True)
class Batch:
    """Rows to encode together."""

    part: int
    rows: Sequence[PendingRow]
    pixels: Tensor  # uint8 [B, side, side, 3]; B is the same for every batch of a job, with padding after the rows
    seen: int  # samples of the part that are done after this batch


class Part:
    """A part of the source: collects its rows and rejections, and hands out the rows in batches."""

    def __init__(self, number: int, job: EncodingJob, pinned: bool):
        self.number = number
        self.job = job
        self.pinned = pinned
        self.error: OSError | None = None  # why it could not be read to its end
        self.pending: deque[tuple[PendingRow, NDArray[np.uint8]]] = deque()  # still to encode, with their pixels
        self.kept = 0
        self.rejected: Counter[str] = Counter()
        self.explained: list[Rejection] = []
        """Only for a job that explains them: a few bytes of a damaged source can stand for millions."""
        distance = job.decoding.rules.max_hash_distance
        self.copies = None if distance is None else NearDuplicates(distance)

    @property
    def seen(self) -> int:
        """Samples that were added."""
        return self.kept + self.rejected.total()

    def add(self, result: Candidate | Rejection) -> None:
        copy = None
        if isinstance(result, Candidate) and self.copies and result.hash is not None:
            copy = self.copies.earlier(result.hash, result.key)
        if copy is not None:
            result = Rejection(result.key, "duplicate", f"looks like {copy}")
        if isinstance(result, Rejection):
            self.rejected[result.reason] += 1
            if self.job.explain:
                self.explained.append(result)
            return
        self.kept += 1
        sample = result.sample
        for view, pixels in enumerate(result.pixels):
            row = partial(
                Row,
                caption=sample.caption or "",
                nsfw=sample.text("NSFW"),
                original_width=result.width,
                original_height=result.height,
                url=sample.text("url"),
                key=f"{result.key}#{view}" if view else result.key,  # the first view has the picture's key
            )
            self.pending.append((row, pixels))

    def take_batch(self) -> Batch:
        size = self.job.batch_size
        chosen = [self.pending.popleft() for _ in range(min(size, len(self.pending)))]
        pixels = torch.zeros(size, *chosen[0][1].shape, dtype=torch.uint8, pin_memory=self.pinned)
        np.stack([one for _, one in chosen], out=pixels.numpy()[: len(chosen)])
        return Batch(self.number, [row for row, _ in chosen], pixels, self.seen)


def make_parts(job: EncodingJob, vqgan: VQGAN, parts: Iterable[int], report: Report) -> None:
    """Write the shard and the record of each part, on the VQGAN's device. `parts` is consumed as the work proceeds.
    OSError if parts could not be read; all other parts are made first. FileNotFoundError at once if another machine has
    finished the folder."""
    encoder = Encoder(vqgan, job.batch_size, job.decoding.side, job.bf16)
    with (
        ThreadPoolExecutor(SHARDS_BEHIND, thread_name_prefix="write") as writer,
        DecodePool(job.decoding, job.workers, job.memory_bytes) as pool,
        ThreadPoolExecutor(1, thread_name_prefix="prepare") as preparer,
        encoder,
    ):
        shards = ShardWriter(job, writer, report)
        prepared = prepare(job, pool, parts, pinned=encoder.device.type == "cuda")
        begun: deque[tuple[Batch | Part, Future[Tensor] | None]] = deque()
        try:
            for event in ahead(preparer, prepared, max(BATCHES_AHEAD, encoder.at_once)):
                begun.append((event, encoder.start(event.pixels) if isinstance(event, Batch) else None))
                # The device gets its next batch before the codes of the last are taken.
                if len(begun) > encoder.at_once:
                    shards.take(*begun.popleft())
            while begun:
                shards.take(*begun.popleft())
            shards.wait(0)
        finally:
            preparer.shutdown(cancel_futures=True)
    if shards.failed:
        listed = "; ".join(f"{job.parts[number]}: {error}" for number, error in shards.failed)
        raise OSError(f"parts of the source could not be read; the same command tries them again ({listed})")


@dataclass
class ShardWriter:
    """Collects the rows of a part and writes whole parts in the background."""

    job: EncodingJob
    writer: Executor
    report: Report
    rows: list[Row] = field(default_factory=list)
    writing: deque[Future[None]] = field(default_factory=deque)
    failed: list[tuple[int, OSError]] = field(default_factory=list)

    def take(self, event: Batch | Part, codes: Future[Tensor] | None) -> None:
        """The next batch of a part with its codes [B, I], or the part at its end."""
        if isinstance(event, Batch):
            assert codes is not None
            values = codes.result().cpu().numpy()[: len(event.rows)]
            self.rows += [row(codes=codes) for row, codes in zip(event.rows, values, strict=True)]
            self.report(event.part, event.seen, False)
            return
        rows, self.rows = self.rows, []
        if event.error is not None:
            self.failed.append((event.number, event.error))
            return
        self.wait(SHARDS_BEHIND - 1)
        self.writing.append(self.writer.submit(write_part, self.job, event, rows))
        self.report(event.number, event.seen, True)

    def wait(self, behind: int) -> None:
        """Wait until at most `behind` parts are still to be written."""
        while len(self.writing) > behind:
            self.writing.popleft().result()


def shard_name(part: str) -> str:
    """The file name of a part's shard."""
    return f"shard-{part}.parquet"


def write_part(job: EncodingJob, part: Part, rows: Sequence[Row]) -> None:
    name = job.parts[part.number]
    path = job.out / shard_name(name)
    if not records_folder(job.out).is_dir():
        return  # another process has written this part too, and the whole is finished
    shard = write_shard(path, rows, vqgan=job.vqgan) if rows else None
    write_record(job.out, name, shard, part.kept, part.rejected, part.explained)


def prepare(job: EncodingJob, pool: DecodePool, parts: Iterable[int], pinned: bool) -> Iterator[Batch | Part]:
    """Read and decode part after part, each as its batches, then the part itself; each starts before the one before
    it is done."""
    part: Part | None = None
    results: Iterator[Candidate | Rejection | Part] = pool.map(samples_of(job, parts, pinned))
    for result in results:
        if part is None:
            assert isinstance(result, Part)
            part = result
        elif not isinstance(result, Part):
            part.add(result)
            while len(part.pending) >= job.batch_size:
                yield part.take_batch()
        else:
            if part.pending and part.error is None:
                yield part.take_batch()
            yield part
            part = None


def samples_of(job: EncodingJob, parts: Iterable[int], pinned: bool) -> Iterator[Sample | Part]:
    """The samples of each part, with the part before and after them."""
    for number in parts:
        part = Part(number, job, pinned)
        yield part
        try:
            yield from job.source.samples(number)
        except OSError as error:
            part.error = error
        yield part


def ahead(executor: Executor, items: Iterator[T], depth: int) -> Iterator[T]:
    """The items, none of them None, computed in the executor's one thread up to `depth` ahead."""
    waiting = deque(executor.submit(next, items, None) for _ in range(depth))
    while (item := waiting.popleft().result()) is not None:
        waiting.append(executor.submit(next, items, None))
        yield item
