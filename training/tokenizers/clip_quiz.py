"""Questions about held-out pictures, each answered by the caption that fits best: a picture's own, or one of others."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from torch import Tensor

from training.data.image_text import ImageTextPairs
from training.tokenizers.hard_negatives import Alike


@dataclass(frozen=True, eq=False)
class Quiz:
    """Q questions of C choices each."""

    pictures: Tensor
    """[Q], rows of held-out pictures."""
    captions: list[str]
    """All that are among the choices."""
    choices: Tensor
    """[Q, C], rows of `captions`; a picture's own stands first."""

    def first(self, picture_features: Tensor, caption_features: Tensor) -> float:
        """Share in 0..1 of questions whose picture fits its own caption best.

        Args:
            picture_features: [N, E] of all held-out pictures.
            caption_features: [len(captions), E].
        """
        scores = torch.einsum("qe,qce->qc", picture_features[self.pictures], caption_features[self.choices])
        return (scores[:, :1] > scores[:, 1:]).all(dim=1).float().mean().item()


def rivals_quiz(
    heldout: ImageTextPairs, train: ImageTextPairs, fields: Sequence[str], of: int, seed: int
) -> Quiz | None:
    """The own caption among `of`, the others of pictures, held out or not, that are alike in `fields` but differ in
    other things. Pictures without so many rivals are left out; None where all are."""
    captions = heldout.captions + train.captions
    alike = Alike(captions, heldout.facts + train.facts, fields)
    questions: list[tuple[int, list[str]]] = []
    for row, own in enumerate(heldout.captions):
        rivals = [captions[rival] for rival in islice(alike.rivals(row, Random(f"{seed}/quiz/{row}")), of - 1)]
        if len(rivals) == of - 1:
            questions.append((row, [own, *rivals]))
    if not questions:
        return None
    row_of = {caption: row for row, caption in enumerate(dict.fromkeys(c for _, asked in questions for c in asked))}
    choices = [[row_of[caption] for caption in asked] for _, asked in questions]
    return Quiz(torch.tensor([row for row, _ in questions]), list(row_of), torch.tensor(choices))
