"""The steps of a part: read, decode and crop, encode, write. All run at the same time, so the VQGAN never waits.

A shard's content depends on its part alone: each part is encoded in batches of one fixed size, the last one padded,
because convolutions round differently for batches of other sizes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar, cast

import torch
from torch import Tensor

from dalle_lean.images.vqgan import VQGAN
from preprocessing.encoding.batches import Batch, PartBuffer
from preprocessing.encoding.decode_pool import DecodePool
from preprocessing.encoding.decoding import Candidate, Decoding, Rejection
from preprocessing.encoding.part_records import records_folder, write_record
from preprocessing.shards.files import Row, write_shard
from preprocessing.sources import Sample, Source

BATCHES_AHEAD = 2
SHARDS_BEHIND = 4
"""Written at once: one core compresses some 200 rows of 1024 codes a second, a GPU makes more."""
SIDE_BY_SIDE_BYTES = 2**28
"""Limit for the widest layers of all batches that a CPU encodes at the same time."""

Report = Callable[[int, int, bool], None]
"""Called with (part, number of its samples that are done, whether these are all)."""
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
    vqgan: str
    """Fingerprint, stored in each shard."""
    workers: int
    """Decoding processes."""
    memory_bytes: int
    """What each may allocate for a picture."""

    @cached_property
    def parts(self) -> Sequence[str]:
        """The names of the source's parts, computed once: there can be very many."""
        return self.source.parts


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
        self.torch_threads = torch.get_num_threads()
        """Of this process, and of threads that start later."""
        if self.device.type == "cpu":
            widest_bytes = 4 * vqgan.config.channels * batch_size * picture_side**2
            self.at_once = min(self.torch_threads, max(1, SIDE_BY_SIDE_BYTES // widest_bytes))

    def __enter__(self) -> Self:
        self.threads = ThreadPoolExecutor(self.at_once, thread_name_prefix="encode", initializer=self.share_cores)
        return self

    def __exit__(self, *exception: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        torch.set_num_threads(self.torch_threads)

    def share_cores(self) -> None:
        if self.at_once > 1:
            torch.set_num_threads(self.torch_threads // self.at_once)

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
            torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16),
        ):
            return self.vqgan.most_likely_codes(images).to(torch.int16)


@dataclass(frozen=True)
class PartStart:
    """Comes before the samples of a part."""

    part: int


@dataclass(frozen=True)
class PartEnd:
    """Comes after the samples of a part."""

    part: int
    error: OSError | None
    """Why the part could not be read to its end."""


Event = Batch | PartBuffer | PartEnd
"""Each part has its batches, then its buffer with the counts, or an end with an error."""


def make_parts(job: EncodingJob, vqgan: VQGAN, parts: Iterable[int], report: Report) -> None:
    """Write the shard and the record of each part, on the VQGAN's device. `parts` is consumed as the work proceeds.

    OSError if parts could not be read; all other parts are made first.
    """
    encoder = Encoder(vqgan, job.batch_size, job.decoding.side, job.bf16)
    with (
        ThreadPoolExecutor(SHARDS_BEHIND, thread_name_prefix="write") as writer,
        DecodePool(job.decoding, job.workers, job.memory_bytes) as pool,
        ThreadPoolExecutor(1, thread_name_prefix="prepare") as preparer,
        encoder,
    ):
        shards = ShardWriter(job, writer, report)
        prepared = prepare(job, pool, parts, pinned=encoder.device.type == "cuda")
        begun: deque[tuple[Event, Future[Tensor] | None]] = deque()
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
        listed = "; ".join(f"{job.parts[end.part]}: {end.error}" for end in shards.failed)
        raise OSError(f"parts of the source could not be read; the same command tries them again ({listed})")


@dataclass
class ShardWriter:
    """Collects the rows of a part and writes whole parts in the background."""

    job: EncodingJob
    writer: Executor
    report: Report
    rows: list[Row] = field(default_factory=list)
    writing: deque[Future[None]] = field(default_factory=deque)
    failed: list[PartEnd] = field(default_factory=list)

    def take(self, event: Event, codes: Future[Tensor] | None) -> None:
        """The next event of a part, with the codes [B, I] if it is a batch."""
        if isinstance(event, Batch):
            assert codes is not None
            values = codes.result().cpu().numpy()[: len(event.rows)]
            self.rows += [row(codes=codes) for row, codes in zip(event.rows, values, strict=True)]
            self.report(event.part, event.seen, False)
            return
        rows, self.rows = self.rows, []
        if isinstance(event, PartEnd):
            self.failed.append(event)
            return
        self.wait(SHARDS_BEHIND - 1)
        self.writing.append(self.writer.submit(write_part, self.job, event, rows))
        self.report(event.number, event.seen, True)

    def wait(self, behind: int) -> None:
        """Wait until at most `behind` parts are still to be written."""
        while len(self.writing) > behind:
            self.writing.popleft().result()


def write_part(job: EncodingJob, part: PartBuffer, rows: Sequence[Row]) -> None:
    name = job.parts[part.number]
    path = job.out / f"shard-{name}.parquet"
    if not records_folder(job.out).is_dir():
        return  # another process has written this part too, and the whole is finished
    try:
        shard = write_shard(path, rows, vqgan=job.vqgan) if rows else None
        write_record(job.out, name, shard, part.kept, part.rejected, part.explained)
    except FileNotFoundError:  # the same, and it removed the records while this one wrote
        if records_folder(job.out).is_dir():
            raise


def prepare(job: EncodingJob, pool: DecodePool, parts: Iterable[int], pinned: bool) -> Iterator[Event]:
    """Read and decode part after part; each starts before the one before it is done."""
    buffer: PartBuffer
    results: Iterator[Candidate | Rejection | PartStart | PartEnd] = pool.map(samples_of(job.source, parts))
    for result in results:
        if isinstance(result, PartStart):
            distance = job.decoding.rules.max_hash_distance
            buffer = PartBuffer(
                result.part, job.batch_size, max_hash_distance=distance, explain=job.explain, pinned=pinned
            )
        elif not isinstance(result, PartEnd):
            buffer.add(result)
            while len(buffer.pending) >= job.batch_size:
                yield buffer.take_batch()
        elif result.error is not None:
            yield result
        else:
            if buffer.pending:
                yield buffer.take_batch()
            yield buffer


def samples_of(source: Source, parts: Iterable[int]) -> Iterator[Sample | PartStart | PartEnd]:
    for part in parts:
        yield PartStart(part)
        error = None
        try:
            yield from source.samples(part)
        except OSError as failure:
            error = failure
        yield PartEnd(part, error)


def ahead(executor: Executor, items: Iterator[T], depth: int) -> Iterator[T]:
    """The items, computed in the executor's one thread up to `depth` ahead."""
    end = object()

    def step() -> T | object:
        return next(items, end)

    waiting = deque(executor.submit(step) for _ in range(depth))
    while (item := waiting.popleft().result()) is not end:
        waiting.append(executor.submit(step))
        yield cast(T, item)
