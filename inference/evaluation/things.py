"""Which of 200 things a picture shows, by a classifier that learnt from drawings of other sets.

Shapes: N pictures, T things.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from dalle_lean.thing_classifier import ThingClassifier
from inference.evaluation.asking import Answer, Attributes
from inference.evaluation.listing import open_drawing
from inference.evaluation.questions import Question
from inference.evaluation.shares import Share

COMPETE = 200


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """Shares of pictures whose thing comes first."""

    by_best_of: dict[int, Share]
    """By the number of pictures of which the best was chosen."""
    on_drawings: Share
    """Of the real drawings: what the classifier itself can do."""
    compete: int
    """So many things."""
    left_out: int
    """Prompts about things that the classifier does not know."""

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "best_of": {str(count): found.to_dict() for count, found in self.by_best_of.items()},
            "on_drawings": self.on_drawings.to_dict(),
            "among": self.compete,
            "left_out": self.left_out,
        }


def recognise(
    classifier: ThingClassifier, asked: Sequence[Attributes], best_of: Sequence[int], seed: int = 0
) -> Recognised:
    """Look at the answers to questions about one thing; a prompt that was asked twice counts once.

    Beside the things asked for stand others, drawn at random by the seed. ValueError where none of them is known.
    """
    pairs: dict[str, tuple[Question, Answer]] = {}
    for attribute in asked:
        for question, answer in zip(attribute.questions, attribute.answers, strict=True):
            if len(question.things) == 1:
                pairs.setdefault(question.prompt, (question, answer))
    known = [(question, answer) for question, answer in pairs.values() if question.things[0] in classifier.row_of]
    if not known:
        raise ValueError(f"the classifier knows none of the things that {len(pairs)} prompts are about")
    names = [question.things[0] for question, _ in known]
    compete = competing(names, classifier.things, seed)

    def right(pictures: Sequence[Image.Image]) -> Share:
        hits = first_of(classifier.scores(pictures).cpu(), classifier.rows(names), classifier.rows(compete))
        return Share(int(hits.sum()), len(hits))

    return Recognised(
        by_best_of={count: right([answer.by_count[count] for _, answer in known]) for count in best_of},
        on_drawings=right([open_drawing(question.drawing) for question, _ in known]),
        compete=len(compete),
        left_out=len(pairs) - len(known),
    )


def competing(names: Sequence[str], things: Sequence[str], seed: int) -> list[str]:
    """All that is asked for and, up to 200 in all, others at random."""
    asked = sorted({*names})
    others = sorted({*things} - {*asked})
    more = min(max(0, COMPETE - len(asked)), len(others))
    return [*asked, *random.Random(f"{seed}/things").sample(others, more)]


def first_of(scores: Tensor, rows: Tensor, compete: Tensor) -> Tensor:
    """Whether thing rows[i] has the largest of the scores of picture i among those that compete: [N, T], [N], [C] ->
    [N] bool."""
    return compete[scores[:, compete].argmax(dim=1)] == rows
