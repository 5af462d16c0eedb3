"""Shards -> batches: streamed, shuffled by a seed, resumable at any `Position`."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.tokenizer import Tokenizer
from preprocessing.shards.files import DamagedShard, Rows, join
from training.data.catalog import ShardSet
from training.data.heldout import by_name_hash, is_heldout, key_hash
from training.data.prefetch import prefetch
from training.data.reader import READ_ROWS, read_rows, undamaged
from training.data.sampler import Position, chunk_start, first_chunk_rows, shard_groups, shuffled
from training.run.recipe import DataRecipe

WINDOWS_AHEAD, BATCHES_AHEAD = 1, 2


class Batch(NamedTuple):
    """Token ids of captions [B, T] and codes of their pictures [B, I], both int64."""

    text_ids: Tensor
    image_codes: Tensor


@dataclass(frozen=True)
class TrainingData:
    """The rows to train on, in their order; see `training.data.sampler`.

    Args:
        shards: see `training.data.catalog.find_shards`.
        recipe: the held-out rows to leave out, the shuffling, the seed and the dropped captions; see `drops`.
        identity: of a peer; each peer has its own order.
    """

    shards: ShardSet
    recipe: DataRecipe
    identity: str = ""

    @property
    def order_seed(self) -> int:
        """Seed of the order, from the recipe's seed and `identity`."""
        seed = self.recipe.seed
        return key_hash(f"order {seed} {self.identity}") if self.identity else seed

    def training_indices(self, rows: Rows) -> list[int]:
        """Indices of the rows that are not held out."""
        share = self.recipe.heldout_share
        return [index for index, key in enumerate(rows.keys) if not (share and is_heldout(key, share))]

    def drops(self, key: str, epoch: int) -> bool:
        """Whether this pass empties the caption of the row with this key.

        Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598, section 3.2). Drawn for each row: drawn by step,
        all peers would drop the same places of their batches.
        """
        share = self.recipe.caption_dropout
        return share > 0 and key_hash(f"dropped caption {self.order_seed} {epoch} {key}") < share * 2**64

    def windows(self, start: Position = Position()) -> Iterator[tuple[Rows, Position]]:
        """Yield windows without end, each with its position; `start.sample` rows of the first one are already used.

        Damaged shards are reported and skipped. ValueError if a whole pass has nothing to train on.
        """
        position = start
        while True:
            groups = shard_groups(len(self.shards.paths), self.recipe.shuffle_shards, self.order_seed, position.epoch)
            whole_pass, num_rows = position.group == position.window == 0, 0
            for group in groups[position.group :]:
                for rows, current in self.group_windows(group, position):
                    num_rows, position = num_rows + len(rows), current
                    yield rows, position
                position = Position(epoch=position.epoch, group=position.group + 1, skipped=position.skipped)
            if whole_pass and not num_rows:
                damaged = f"; {position.skipped} were damaged" if position.skipped else ""
                raise UserError(
                    f"{self.shards.name} has no sample to train on in {len(self.shards.paths)} shards{damaged}"
                )
            position = Position(epoch=position.epoch + 1, skipped=position.skipped)

    def group_windows(self, group: list[int], position: Position) -> Iterator[tuple[Rows, Position]]:
        """The remaining windows of a group of shards. The last one is empty: its position records the lost shards."""
        chunk = -(-self.recipe.shuffle_buffer // len(group))
        first_chunks = {
            shard: first_chunk_rows(chunk, self.shards.rows[shard], self.order_seed, position.epoch, shard)
            for shard in group
            if shard not in position.lost
        }
        left = {
            shard: read_rows(
                self.shards,
                shard,
                chunk_start(position.window, first, chunk),
                chunk,
                first_count=chunk if position.window else first,
            )
            for shard, first in first_chunks.items()
        }
        while True:
            parts, trained, size = [Rows.none()], [], 0
            for shard, chunks in list(left.items()):
                start = chunk_start(position.window, first_chunks[shard], chunk)
                self.shards.reading = self.shards.paths[shard]
                try:
                    rows = next(chunks, None)
                except DamagedShard as damage:
                    self.shards.on_notice(f"{damage}; skipped from row {start} on")
                    position = replace(position, lost=(*position.lost, shard), skipped=position.skipped + 1)
                    rows = None
                if rows is None:
                    del left[shard]
                else:
                    parts.append(rows)
                    trained += [size + index for index in self.training_indices(rows)]
                    size += len(rows)
            order = shuffled(len(trained), self.order_seed, position.epoch, position.group, position.window).tolist()
            yield join(parts).take([trained[index] for index in order]), position
            if not left:
                return
            position = replace(position, window=position.window + 1, sample=0)

    def batches(
        self, batch_size: int, tokenizer: Tokenizer, text_len: int, start: Position = Position()
    ) -> Iterator[tuple[Batch, Position]]:
        """Yield batches without end, each with the position behind it; a batch may span windows and passes."""
        parts: list[Rows] = []
        dropped: list[bool] = []
        missing = batch_size
        with closing(prefetch(self.windows(start), WINDOWS_AHEAD)) as windows:
            for rows, position in windows:
                used = position.sample
                while used < len(rows):
                    parts.append(rows.part(used, used + missing))
                    used += len(parts[-1])
                    missing -= len(parts[-1])
                    dropped += [self.drops(key, position.epoch) for key in parts[-1].keys]
                    if not missing:
                        batch = empty_captions(collate(join(parts), tokenizer, text_len), dropped)
                        yield batch, replace(position, sample=used)
                        parts, dropped, missing = [], [], batch_size

    def ahead(
        self,
        batches: Iterator[tuple[Batch, Position]],
        *,
        pin: bool = False,
        stop_waiting: Callable[[], bool] | None = None,
    ) -> Generator[tuple[Batch, Position], None, None]:
        """Prefetch the batches in a thread; long waits are reported.

        Args:
            pin: put them into pinned memory, from which CUDA copies asynchronously.
            stop_waiting: see `prefetch`.
        """

        def pinned() -> Iterator[tuple[Batch, Position]]:
            for batch, position in batches:
                yield (Batch(*(part.pin_memory() for part in batch)) if pin else batch), position

        def on_wait(seconds: float) -> None:
            self.shards.on_notice(f"still waiting for data after {seconds:.0f} s: reading {self.shards.reading}")

        return prefetch(pinned(), BATCHES_AHEAD, on_wait, stop_waiting)

    def captions(self, order: Iterable[int] | None = None) -> Iterator[str]:
        """The captions of the rows to train on, shard by shard; `order` lists shard indices."""
        for shard in range(len(self.shards.paths)) if order is None else order:
            for rows in undamaged(self.shards, read_rows(self.shards, shard, 0, READ_ROWS, codes=False)):
                yield from (rows.captions[index] for index in self.training_indices(rows))

    def mixed_captions(self) -> Iterator[str]:
        """The same captions in an order whose first ones are representative, however the data is sorted."""
        return self.captions(by_name_hash(self.shards))


def collate(rows: Rows, tokenizer: Tokenizer, text_len: int) -> Batch:
    """Rows -> a batch, with captions truncated or padded to `text_len` ids."""
    return Batch(tokenizer.encode(rows.captions, text_len), torch.from_numpy(rows.codes.astype(np.int64)))


def empty_captions(batch: Batch, dropped: list[bool]) -> Batch:
    """The batch with the `dropped` captions empty (all ids 0), as guidance takes them."""
    if not any(dropped):
        return batch
    return batch._replace(text_ids=batch.text_ids.masked_fill(torch.tensor(dropped)[:, None], 0))
