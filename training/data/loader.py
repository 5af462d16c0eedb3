"""Shards -> batches: streamed, shuffled with a seed, the same from any `Position` on."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.tokenizer import Tokenizer
from training.data.catalog import ShardSet
from training.data.heldout import is_heldout, key_hash, mixed
from training.data.prefetch import prefetch
from training.data.reader import DamagedShard, Rows, join, read_rows, whole_shard
from training.data.sampler import Position, first_run, run_start, shard_groups, window_order

WINDOWS_AHEAD, BATCHES_AHEAD = 1, 2


class Batch(NamedTuple):
    """Captions [B, T] and the codes of their pictures [B, I], both int64."""

    text_ids: Tensor
    image_codes: Tensor


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The rows to train on and the order they come in; see `training.data.sampler`.

    Args:
        shards: see `training.data.catalog.find_shards`.
        heldout_share: share of the rows, by the hash of their keys, that is left out.
        shuffle_buffer: rows shuffled together, and so held in memory.
        shuffle_shards: shards they come from.
        seed: of the order and the dropped captions.
        identity: of a peer; each has its own order.
        caption_dropout: share of the captions that are empty in the batches of a pass; see `drops`.
    """

    shards: ShardSet
    heldout_share: float
    shuffle_buffer: int
    seed: int
    shuffle_shards: int = 8
    identity: str = ""
    caption_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.shuffle_buffer < 1 or self.shuffle_shards < 1:
            raise UserError(
                f"shuffle_buffer={self.shuffle_buffer}, shuffle_shards={self.shuffle_shards}: must be at least 1"
            )

    @property
    def order_seed(self) -> int:
        """What the order follows from: the seed, and whose data it is."""
        return key_hash(f"order {self.seed} {self.identity}") if self.identity else self.seed

    def chosen(self, rows: Rows) -> list[int]:
        """Which of these rows are trained on."""
        share = self.heldout_share
        return [place for place in range(len(rows)) if not (share and is_heldout(rows.keys[place], share))]

    def drops(self, key: str, epoch: int) -> bool:
        """Whether the caption of the row with this key is empty in this pass.

        Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598, section 3.2). Drawn for each row by itself: what
        follows from the step would be the same in the batches of all peers.
        """
        share = self.caption_dropout
        return share > 0 and key_hash(f"dropped caption {self.order_seed} {epoch} {key}") < share * 2**64

    def windows(self, start: Position = Position()) -> Iterator[tuple[Rows, Position]]:
        """Windows for ever, each with its position; of the first one, `start.sample` rows were given before.

        A damaged shard is named and passed over. ValueError where a whole pass has nothing to train on.
        """
        position = start
        while True:
            groups = shard_groups(len(self.shards.paths), self.shuffle_shards, self.order_seed, position.epoch)
            whole, given = position.group == position.window == 0, 0
            for group in groups[position.group :]:
                for rows, here in self.group_windows(group, position):
                    given, position = given + len(rows), here
                    yield rows, position
                position = Position(epoch=position.epoch, group=position.group + 1, skipped=position.skipped)
            if whole and not given:
                damaged = f"; {position.skipped} were damaged" if position.skipped else ""
                raise UserError(
                    f"{self.shards.name} has no sample to train on in {len(self.shards.paths)} shards{damaged}"
                )
            position = Position(epoch=position.epoch + 1, skipped=position.skipped)

    def group_windows(self, group: list[int], position: Position) -> Iterator[tuple[Rows, Position]]:
        """The windows that are left of a group of shards. The last one is empty: its position holds what was lost."""
        run = -(-self.shuffle_buffer // len(group))
        firsts = {
            number: first_run(run, self.shards.rows[number], self.order_seed, position.epoch, number)
            for number in group
            if number not in position.lost
        }
        left = {
            number: read_rows(
                self.shards,
                number,
                run_start(position.window, first, run),
                run,
                first_count=run if position.window else first,
            )
            for number, first in firsts.items()
        }
        while True:
            parts, trained, size = [Rows.none()], [], 0
            for number, runs in list(left.items()):
                start = run_start(position.window, firsts[number], run)
                self.shards.reading.path = self.shards.paths[number]
                try:
                    rows = next(runs, None)
                except DamagedShard as damage:
                    self.shards.on_notice(f"{damage}; passed over from row {start} on")
                    position = replace(position, lost=(*position.lost, number), skipped=position.skipped + 1)
                    rows = None
                if rows is None:
                    del left[number]
                else:
                    parts.append(rows)
                    trained += [size + place for place in self.chosen(rows)]
                    size += len(rows)
            order = window_order(len(trained), self.order_seed, position).tolist()
            yield join(parts).take([trained[place] for place in order]), position
            if not left:
                return
            position = replace(position, window=position.window + 1, sample=0)

    def batches(
        self, batch_size: int, tokenizer: Tokenizer, text_len: int, start: Position = Position()
    ) -> Iterator[tuple[Batch, Position]]:
        """Batches for ever, each with the position where it ends: perhaps in the next window, or the next pass."""
        parts: list[Rows] = []
        dropped: list[bool] = []
        missing = batch_size
        with closing(prefetch(self.windows(start), WINDOWS_AHEAD)) as windows:
            for rows, position in windows:
                given = position.sample
                while given < len(rows):
                    parts.append(rows.part(given, given + missing))
                    given += len(parts[-1])
                    missing -= len(parts[-1])
                    dropped += [self.drops(key, position.epoch) for key in parts[-1].keys]
                    if not missing:
                        batch = empty_captions(collate(join(parts), tokenizer, text_len), dropped)
                        yield batch, replace(position, sample=given)
                        parts, dropped, missing = [], [], batch_size

    def ahead(
        self,
        batches: Iterator[tuple[Batch, Position]],
        *,
        pin: bool = False,
        stop_waiting: Callable[[], bool] | None = None,
    ) -> Generator[tuple[Batch, Position], None, None]:
        """The same batches, prefetched by a thread; a long wait for one is reported.

        Args:
            pin: put them into pinned memory, from which CUDA copies asynchronously.
            stop_waiting: see `prefetch`.
        """

        def pinned() -> Iterator[tuple[Batch, Position]]:
            for batch, position in batches:
                yield (Batch(*(part.pin_memory() for part in batch)) if pin else batch), position

        def on_wait(seconds: float) -> None:
            self.shards.on_notice(f"waiting for data since {seconds:.0f} s: reading {self.shards.reading.path}")

        return prefetch(pinned(), BATCHES_AHEAD, on_wait, stop_waiting)

    def captions(self) -> Iterator[str]:
        """The captions trained on, in the order of the shards."""
        return self.captions_of(range(len(self.shards.paths)))

    def mixed_captions(self) -> Iterator[str]:
        """The captions trained on, in an order whose first ones are representative, however the data is sorted."""
        return self.captions_of(mixed(self.shards))

    def captions_of(self, numbers: Iterable[int]) -> Iterator[str]:
        """The captions trained on, of these shards."""
        for number in numbers:
            for rows in whole_shard(self.shards, number, codes=False):
                for place in self.chosen(rows):
                    yield rows.captions[place]


def collate(rows: Rows, tokenizer: Tokenizer, text_len: int) -> Batch:
    """Rows -> a batch; captions are cut or padded to `text_len` ids."""
    return Batch(tokenizer.encode(rows.captions, text_len), torch.from_numpy(rows.codes.astype(np.int64)))


def empty_captions(batch: Batch, dropped: list[bool]) -> Batch:
    """The batch with every caption that is `dropped` empty, that is of ids 0: what guidance starts from."""
    if not any(dropped):
        return batch
    return batch._replace(text_ids=batch.text_ids.masked_fill(torch.tensor(dropped)[:, None], 0))
