"""Batches with hard negatives: similar pictures, so that a CLIP must learn what distinguishes them (Robinson et al.
2020, arXiv 2010.04592); and ranking questions: does a held-out picture's caption score above those of similar pictures?

Fields of the listing define similarity: the same background and position, for example, but different things.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from training.clip.recipe import ClipRecipe
from training.data.image_text import Attributes, ImageTextPairs
from training.data.picture_batches import caption_key

logger = logging.getLogger(__name__)


class SimilarPictures:
    """Captioned pictures, grouped by the values of some fields.

    Two pictures are hard negatives of each other if they agree in these fields, differ in another one, and have
    different captions. A picture that lacks one of these fields has none.
    """

    def __init__(self, captions: Sequence[str], attributes: Sequence[Attributes], fields: Sequence[str]):
        self.keys = [caption_key(caption) for caption in captions]
        self.groups: list[tuple[str, ...] | None] = []
        self.other_fields: list[frozenset[tuple[str, str]]] = []
        self.rows_of: dict[tuple[str, ...], list[int]] = {}
        for row, listed in enumerate(attributes):
            group = tuple(listed[name] for name in fields) if listed.keys() >= {*fields} else None
            self.groups.append(group)
            self.other_fields.append(frozenset((name, value) for name, value in listed.items() if name not in fields))
            if group is not None:
                self.rows_of.setdefault(group, []).append(row)
        self.varied = {
            group for group, rows in self.rows_of.items() if len({self.other_fields[row] for row in rows}) > 1
        }
        """Groups whose pictures differ in other fields, and so have hard negatives."""

    def negatives(self, row: int, random: Random) -> Iterator[int]:
        """Hard negatives of a picture and of each other, in random order, chosen greedily."""
        group, seen, captions = self.groups[row], {self.other_fields[row]}, {self.keys[row]}
        for other in shuffled(self.rows_of[group] if group is not None else [], random):
            if self.other_fields[other] not in seen and self.keys[other] not in captions:
                seen.add(self.other_fields[other])
                captions.add(self.keys[other])
                yield other


class HardNegatives:
    """Completes batches from anchors (rows to start with) by hard negatives, no caption twice.

    Groups of hard negatives, each with its anchor, take turns in which tuple of `recipe.alike` their pictures agree in.
    A tuple that yields no hard negatives is dropped, which is logged; if none is left, a batch consists of anchors.
    """

    def __init__(self, data: ImageTextPairs, recipe: ClipRecipe):
        self.keys = [caption_key(caption) for caption in data.captions]
        self.batch_size, self.seed = recipe.batch_size, recipe.seed
        if self.batch_size > len(set(self.keys)):
            raise UserError(
                f"batch_size={self.batch_size}: there are only {len(set(self.keys))} different captions; lower it"
            )
        self.group_size = min(recipe.hard_group_size, self.batch_size // 2)
        groups_in_share = int(recipe.hard_negative_share * self.batch_size / self.group_size)
        self.groups = groups_in_share if self.group_size > 1 else 0
        self.kinds: list[SimilarPictures] = []
        for fields in recipe.alike if self.groups else ():
            similar = SimilarPictures(data.captions, data.attributes, fields)
            if similar.varied:
                self.kinds.append(similar)
            else:
                lacking = [name for name in fields if not any(name in listed for listed in data.attributes)]
                reason = f"the listing lacks {', '.join(lacking)}" if lacking else "they differ in no other field"
                logger.info(f"no hard negatives of pictures with the same {', '.join(fields)}: {reason}")
        if not self.kinds:
            self.groups = 0
        self.num_anchors = self.batch_size - self.groups * (self.group_size - 1)

    def batch(self, step: int, anchors: Sequence[int]) -> list[int]:
        """The rows of a step: the anchors, which have distinct captions, then hard negatives of some of them and, if
        these are too few, random rows."""
        random = Random(f"{self.seed}/hard negatives/{step}")
        rows = {self.keys[row]: row for row in anchors}
        grown = 0
        for row in anchors:
            if grown == self.groups:
                break
            if kind := self._kind_of(row, step + grown):
                self._add(rows, kind.negatives(row, random), most=len(rows) + self.group_size - 1)
                grown += 1
        self._add(rows, shuffled(range(len(self.keys)), random), most=self.batch_size)
        return list(rows.values())

    def extra_captions(self, step: int, batch: Sequence[int], count: int) -> list[int]:
        """Rows of up to `count` captions that describe no picture of the batch, as far as the listing says: hard
        negatives of each picture, then random rows."""
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
        """The first kind with hard negatives of the row, starting at number `first` (cyclic); None if there is none."""
        kinds = self.kinds
        by_turns = (kinds[(first + number) % len(kinds)] for number in range(len(kinds)))
        return next((kind for kind in by_turns if kind.groups[row] in kind.varied), None)

    def _add(self, rows: dict[str, int], candidates: Iterable[int], most: int) -> None:
        """Add candidates whose captions are not in `rows`, until it has `most`."""
        for row in candidates:
            if len(rows) >= most:
                break
            rows.setdefault(self.keys[row], row)


def shuffled(rows: Sequence[int], random: Random) -> Iterator[int]:
    """Shuffle `rows` lazily, so that the first few of many are cheap."""
    moved: dict[int, int] = {}
    for left in range(len(rows), 0, -1):
        at = random.randrange(left)
        yield rows[moved.get(at, at)]
        moved[at] = moved.get(left - 1, left - 1)


@dataclass(frozen=True, eq=False)
class RankingQuestions:
    """Q questions with C choices each."""

    pictures: Tensor
    """Rows of held-out pictures, [Q]."""
    captions: list[str]
    """All captions that occur among the choices."""
    choices: Tensor
    """Rows of `captions`, [Q, C]; the picture's own comes first."""

    def accuracy(self, picture_features: Tensor, caption_features: Tensor) -> float:
        """Share in 0..1 of questions where the picture's own caption scores best; a tie counts as wrong.

        Args:
            picture_features: [N, E] of all held-out pictures.
            caption_features: [len(captions), E].
        """
        scores = torch.einsum("qe,qce->qc", picture_features[self.pictures], caption_features[self.choices])
        return (scores[:, :1] > scores[:, 1:]).all(dim=1).float().mean().item()


def ranking_questions(
    heldout: ImageTextPairs, train: ImageTextPairs, fields: Sequence[str], of: int, seed: int
) -> RankingQuestions | None:
    """Questions with `of` choices: a picture's own caption and those of its hard negatives by these `fields`, held out
    or not. Pictures with too few hard negatives are left out; None if all are."""
    captions = heldout.captions + train.captions
    similar = SimilarPictures(captions, heldout.attributes + train.attributes, fields)
    questions: list[tuple[int, list[str]]] = []
    for row, own in enumerate(heldout.captions):
        negatives = similar.negatives(row, Random(f"{seed}/quiz/{row}"))
        others = [captions[negative] for negative in islice(negatives, of - 1)]
        if len(others) == of - 1:
            questions.append((row, [own, *others]))
    if not questions:
        return None
    row_of = {caption: row for row, caption in enumerate(dict.fromkeys(c for _, asked in questions for c in asked))}
    choices = [[row_of[caption] for caption in asked] for _, asked in questions]
    return RankingQuestions(torch.tensor([row for row, _ in questions]), list(row_of), torch.tensor(choices))
