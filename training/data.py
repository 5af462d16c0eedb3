"""Shards -> batches: streamed, shuffled with a seed, the same from any position on."""

import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dalle_lean.tokenizer import Tokenizer
from preprocessing.shards import open_stream

Sample = dict[str, Any]
"""A row of a shard: caption (str), codes (integers [I]) and key (str)."""


class Batch(NamedTuple):
    """Captions [B, T] and the codes of their pictures [B, I], both int64."""

    text_ids: Tensor
    image_codes: Tensor


class Position(NamedTuple):
    """How far the data was read: whole passes over it, then samples of the present pass."""

    epoch: int = 0
    sample: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The rows to train on and the order they come in.

    Args:
        folder: shards as `preprocess` writes them.
        heldout_share: share of the rows, by the hash of their keys, that is left out.
        shuffle_buffer: samples held in memory to shuffle among; shards are shuffled too.
        seed: of the order.
    """

    folder: Path
    heldout_share: float
    shuffle_buffer: int
    seed: int

    def epoch(self, epoch: int) -> Iterator[Sample]:
        """One pass over the data, in an order of its own."""
        stream = open_stream(self.folder).shuffle(seed=self.seed, buffer_size=self.shuffle_buffer)
        stream.set_epoch(epoch)
        return (row for row in stream if not is_heldout(row["key"], self.heldout_share))

    def samples(self, start: Position) -> Iterator[tuple[Sample, Position]]:
        """Sample after sample for ever, each with the position behind it.

        `datasets` forgets its shuffle buffer when it resumes, so the samples before `start` are read again and dropped:
        exact, and fast beside training on them.
        """
        epoch, skip = start
        while True:
            sample = skip
            for row in islice(self.epoch(epoch), skip, None):
                sample += 1
                yield row, Position(epoch, sample)
            if sample == 0:
                raise ValueError(f"{self.folder} has no sample to train on")
            epoch, skip = epoch + 1, 0

    def batches(
        self, batch_size: int, tokenizer: Tokenizer, text_len: int, start: Position = Position()
    ) -> Iterator[tuple[Batch, Position]]:
        """Batches for ever, each with the position behind it; a batch may reach into the next pass."""
        samples = self.samples(start)
        while True:
            rows, positions = zip(*islice(samples, batch_size), strict=True)
            yield collate(rows, tokenizer, text_len), positions[-1]


def collate(rows: tuple[Sample, ...] | list[Sample], tokenizer: Tokenizer, text_len: int) -> Batch:
    """Samples -> a batch; captions are cut or padded to `text_len` ids."""
    codes = np.stack([np.asarray(row["codes"], dtype=np.int64) for row in rows])
    return Batch(tokenizer.encode([row["caption"] for row in rows], text_len), torch.from_numpy(codes))


def drop_captions(batch: Batch, share: float, *, seed: int, step: int) -> Batch:
    """The batch of a step with about `share` of its captions empty, that is of ids 0: what guidance starts from.

    Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598, section 3.2). Which captions go follows from seed
    and step alone, so that a resumed run draws the same.
    """
    if share == 0:
        return batch
    generator = torch.Generator().manual_seed(key_hash(f"dropped captions {seed} {step}"))
    kept = torch.rand(len(batch.text_ids), 1, generator=generator) >= share
    return batch._replace(text_ids=batch.text_ids * kept)


def key_hash(key: str) -> int:
    """A number in 0..2**64-1 that looks drawn at random, the same always and everywhere."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def is_heldout(key: str, share: float) -> bool:
    """Whether the row with this key is kept away from training."""
    return key_hash(key) < share * 2**64


def heldout_rows(data: TrainingData, heldout: Path | None, count: int) -> list[Sample]:
    """At most `count` rows never trained on: of the shards `heldout`, else of those that `data` leaves out.

    Those whose keys have the smallest hashes: a fair sample wherever they stand. Holds `count` rows in memory.
    """
    rows = open_stream(heldout or data.folder)
    if heldout is None:
        rows = (row for row in rows if is_heldout(row["key"], data.heldout_share))
    return heapq.nsmallest(count, rows, key=lambda row: key_hash(row["key"]))


def captions(data: TrainingData) -> Iterator[str]:
    """The captions trained on, in the order of the shards."""
    for row in open_stream(data.folder):
        if not is_heldout(row["key"], data.heldout_share):
            yield row["caption"]
