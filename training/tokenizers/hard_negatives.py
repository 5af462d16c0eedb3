"""Batches in which pictures meet that are easily taken for each other, so that a CLIP has to learn what tells them
apart (hard negatives; Robinson et al. 2020, arXiv 2010.04592).

Which pictures are alike is told by fields of their listing: alike in ground and place, say, but with other things.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from dalle_lean.errors import UserError
from training.data.image_text import Facts, ImageTextPairs, caption_key


class Alike:
    """Captioned pictures, grouped by what their lines say in some fields.

    Two pictures are rivals where they agree in these fields, differ in another one, and have different captions. A
    picture whose line lacks one of these fields has no rivals.
    """

    def __init__(self, captions: Sequence[str], facts: Sequence[Facts], fields: Sequence[str]):
        self.keys = [caption_key(caption) for caption in captions]
        self.looks: list[tuple[str, ...] | None] = []
        self.others: list[frozenset[tuple[str, str]]] = []
        self.rows_of: dict[tuple[str, ...], list[int]] = {}
        for row, told in enumerate(facts):
            look = tuple(told[name] for name in fields) if told.keys() >= {*fields} else None
            self.looks.append(look)
            self.others.append(frozenset((name, fact) for name, fact in told.items() if name not in fields))
            if look is not None:
                self.rows_of.setdefault(look, []).append(row)
        self.varied = {look for look, rows in self.rows_of.items() if len({self.others[row] for row in rows}) > 1}
        """Looks of pictures that differ in other fields."""

    def has_rivals(self, row: int) -> bool:
        """Whether pictures of its look differ in other fields."""
        return self.looks[row] in self.varied

    def rivals(self, row: int, random: Random) -> Iterator[int]:
        """Rivals of a picture in random order, any two of which are rivals too; as many as are found that way."""
        look, seen, captions = self.looks[row], {self.others[row]}, {self.keys[row]}
        for rival in shuffled(self.rows_of[look] if look is not None else [], random):
            if self.others[rival] not in seen and self.keys[rival] not in captions:
                seen.add(self.others[rival])
                captions.add(self.keys[rival])
                yield rival


class HardNegatives:
    """Makes whole batches of rows, no caption twice, from the rows that they begin with.

    Args:
        kinds: lists of fields; of the groups in a batch, one after another is alike in the next of them. A list by
            which no pictures are rivals is left out; where none is left, a batch is what it begins with.
        share: of a batch, that at most is to be groups.
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
        self.kinds: list[Alike] = []
        self.notices: list[str] = []
        """What a person should know of the kinds that are left out."""
        for fields in kinds if self.groups else ():
            alike = Alike(data.captions, data.facts, fields)
            if alike.varied:
                self.kinds.append(alike)
            else:
                lacking = [name for name in fields if not any(name in told for told in data.facts)]
                reason = f"the listing lacks {', '.join(lacking)}" if lacking else "they differ in no other field"
                self.notices.append(f"no hard negatives of pictures with the same {', '.join(fields)}: {reason}")
        if not self.kinds:
            self.groups = 0
        self.seeds = batch_size - self.groups * (self.group_size - 1)
        """Rows that a batch begins with."""

    def batch(self, step: int, seeds: Sequence[int]) -> list[int]:
        """The rows of a step: those that it begins with, no caption twice; the rivals of some of them; then, where too
        few were found, any."""
        random = Random(f"{self.seed}/hard negatives/{step}")
        rows = {self.keys[row]: row for row in seeds}

        def add(candidates: Iterable[int], most: int) -> None:
            for row in candidates:
                if len(rows) >= most:
                    break
                rows.setdefault(self.keys[row], row)

        grown = 0
        for row in seeds:
            if grown == self.groups:
                break
            first = (step + grown) % len(self.kinds)
            able = [kind for kind in (*self.kinds[first:], *self.kinds[:first]) if kind.has_rivals(row)]
            if able:
                add(able[0].rivals(row, random), most=len(rows) + self.group_size - 1)
                grown += 1
        add(shuffled(range(len(self.keys)), random), most=self.batch_size)
        return list(rows.values())


def shuffled(rows: Sequence[int], random: Random) -> Iterator[int]:
    """`rows` in random order, drawn as they are asked for: the first few of many cost little."""
    moved: dict[int, int] = {}
    for left in range(len(rows), 0, -1):
        at = random.randrange(left)
        yield rows[moved.get(at, at)]
        moved[at] = moved.get(left - 1, left - 1)
