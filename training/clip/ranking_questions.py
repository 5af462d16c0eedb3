"""Ranking questions: does a held-out picture's caption score above those of similar pictures?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from torch import Tensor

from training.clip.hard_negatives import SimilarPictures
from training.data.image_text import ImageTextPairs


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
