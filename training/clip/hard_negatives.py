"""Batches with hard negatives: similar pictures, so that a CLIP has to learn what tells them apart (Robinson et al.
2020, arXiv 2010.04592).

Fields of the listing say which pictures are similar: the same ground and place, for example, but other things.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from random import Random

from dalle_lean.errors import UserError
from training.data.image_text import Attributes, ImageTextPairs
from training.data.picture_batches import caption_key

logger = logging.getLogger(__name__)


class SimilarPictures:
    """Captioned pictures, grouped by their attributes in some fields.

    Two pictures are hard negatives of each other where they agree in these fields, differ in another one, and have
    different captions. A picture that lacks one of these fields has none.
    """

    def __init__(self, captions: Sequence[str], attributes: Sequence[Attributes], fields: Sequence[str]):
        self.keys = [caption_key(caption) for caption in captions]
        self.groups: list[tuple[str, ...] | None] = []
        self.others: list[frozenset[tuple[str, str]]] = []
        self.rows_of: dict[tuple[str, ...], list[int]] = {}
        for row, listed in enumerate(attributes):
            group = tuple(listed[name] for name in fields) if listed.keys() >= {*fields} else None
            self.groups.append(group)
            self.others.append(frozenset((name, value) for name, value in listed.items() if name not in fields))
            if group is not None:
                self.rows_of.setdefault(group, []).append(row)
        self.varied = {group for group, rows in self.rows_of.items() if len({self.others[row] for row in rows}) > 1}
        """Groups whose pictures differ in other fields."""

    def has_negatives(self, row: int) -> bool:
        """Whether pictures of its group differ in other fields."""
        return self.groups[row] in self.varied

    def negatives(self, row: int, random: Random) -> Iterator[int]:
        """Hard negatives of a picture, and of each other, in random order; as many as are found that way."""
        group, seen, captions = self.groups[row], {self.others[row]}, {self.keys[row]}
        for other in shuffled(self.rows_of[group] if group is not None else [], random):
            if self.others[other] not in seen and self.keys[other] not in captions:
                seen.add(self.others[other])
                captions.add(self.keys[other])
                yield other


class HardNegatives:
    """Fills batches of rows, no caption twice, from the rows that they start with.

    Args:
        kinds: lists of fields; the groups in a batch agree in each of them by turns. A list by which there are no hard
            negatives is left out, which is logged; where none is left, a batch is what it starts with.
        share: largest share of a batch that groups make up.
        group_size: pictures in a group; half a batch where that is less.
    """

    def __init__(
        self,
        data: ImageTextPairs,
        kinds: Sequence[Sequence[str]],
        *,
        batch_size: int,
        share: float,
        group_size: int,
        seed: int,
    ):
        self.keys = [caption_key(caption) for caption in data.captions]
        if batch_size > len(set(self.keys)):
            raise UserError(f"batch_size={batch_size}: there are only {len(set(self.keys))} different captions")
        self.batch_size = batch_size
        self.group_size = min(group_size, batch_size // 2)
        self.seed = seed
        self.groups = int(share * batch_size / self.group_size) if self.group_size > 1 else 0
        """In a batch."""
        self.kinds: list[SimilarPictures] = []
        for fields in kinds if self.groups else ():
            similar = SimilarPictures(data.captions, data.attributes, fields)
            if similar.varied:
                self.kinds.append(similar)
            else:
                lacking = [name for name in fields if not any(name in listed for listed in data.attributes)]
                reason = f"the listing lacks {', '.join(lacking)}" if lacking else "they differ in no other field"
                logger.info(f"no hard negatives of pictures with the same {', '.join(fields)}: {reason}")
        if not self.kinds:
            self.groups = 0
        self.seeds = batch_size - self.groups * (self.group_size - 1)
        """Rows that a batch starts with."""

    def batch(self, step: int, seeds: Sequence[int]) -> list[int]:
        """The rows of a step: those that it starts with, no caption twice; hard negatives of some of them; then, where
        too few were found, any."""
        random = Random(f"{self.seed}/hard negatives/{step}")
        rows = {self.keys[row]: row for row in seeds}
        grown = 0
        for row in seeds:
            if grown == self.groups:
                break
            if kind := self._kind_of(row, step + grown):
                self._add(rows, kind.negatives(row, random), most=len(rows) + self.group_size - 1)
                grown += 1
        self._add(rows, shuffled(range(len(self.keys)), random), most=self.batch_size)
        return list(rows.values())

    def extra_captions(self, step: int, batch: Sequence[int], count: int) -> list[int]:
        """Rows of `count` captions that are wrong for the pictures of a batch, as far as the listing tells: hard
        negatives of each of them, then any. Fewer where there are not enough different captions."""
        random = Random(f"{self.seed}/extra captions/{step}")
        rows = {self.keys[row]: row for row in batch}
        most = len(batch) + count
        for number, row in enumerate(batch):
            if kind := self._kind_of(row, step + number):
                of_this = -(-count // len(batch))
                self._add(rows, kind.negatives(row, random), most=min(most, len(rows) + of_this))
        self._add(rows, shuffled(range(len(self.keys)), random), most=most)
        return list(rows.values())[len(batch) :]

    def _kind_of(self, row: int, first: int) -> SimilarPictures | None:
        """The kind of similar pictures to take for a row: the `first` one, or the next that has any; None: none has."""
        kinds = self.kinds
        by_turns = (kinds[(first + number) % len(kinds)] for number in range(len(kinds)))
        return next((kind for kind in by_turns if kind.has_negatives(row)), None)

    def _add(self, rows: dict[str, int], candidates: Iterable[int], most: int) -> None:
        """Add candidates with captions that are not in `rows` yet, until there are `most`."""
        for row in candidates:
            if len(rows) >= most:
                break
            rows.setdefault(self.keys[row], row)


def shuffled(rows: Sequence[int], random: Random) -> Iterator[int]:
    """`rows` in random order, lazily: the first few of many cost little."""
    moved: dict[int, int] = {}
    for left in range(len(rows), 0, -1):
        at = random.randrange(left)
        yield rows[moved.get(at, at)]
        moved[at] = moved.get(left - 1, left - 1)
