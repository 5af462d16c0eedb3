"""Which of 200 things a picture shows, by a classifier that learnt from drawings of other sets.

Shapes: N pictures, T things, C of them that compete.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.thing_classifier import ThingClassifier
from dalle_lean.images.vqgan import VQGAN
from inference.evaluation.attribute_accuracy import Answer, Attributes
from inference.evaluation.captions import open_pixels
from inference.evaluation.proportions import Share
from inference.evaluation.questions import Question
from inference.evaluation.reconstruction import reconstruct

COMPETE = 200


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """Shares of pictures whose thing comes first, of all prompts about one thing: on grounds, in colours, of sizes."""

    by_best_of: dict[int, Share]
    """By the number of pictures of which the best was chosen."""
    on_drawings: Share
    """Of the real drawings: what the classifier itself can do."""
    on_reconstructions: Share
    """Of the same through the tokenizer: what a model could reach that draws them all right."""
    compete: int
    """So many things."""
    different_things: int
    """Of the prompts; several may be about the same."""
    left_out: int
    """Prompts about things that the classifier does not know."""
    classifier_sha256: str | None

    def to_dict(self) -> dict[str, Any]:
        """For a report."""
        shares = {
            "best_of": {str(count): found.to_dict() for count, found in self.by_best_of.items()},
            "on_drawings": self.on_drawings.to_dict(),
            "on_reconstructions": self.on_reconstructions.to_dict(),
        }
        return {**{name: value for name, value in asdict(self).items() if name != "by_best_of"}, **shares}


def about_one_thing(asked: Mapping[str, Sequence[Question]]) -> list[Question]:
    """The questions whose picture shows one thing, each prompt once."""
    found: dict[str, Question] = {}
    for questions in asked.values():
        for question in questions:
            if len(question.things) == 1:
                found.setdefault(question.prompt, question)
    return list(found.values())


def refuse_strange_things(asked: Mapping[str, Sequence[Question]], classifier: ThingClassifier) -> None:
    """ValueError where the classifier knows nothing of what is asked for."""
    if not any(question.things[0] in classifier.row_of for question in about_one_thing(asked)):
        raise UserError(
            "no prompt is about one thing that the classifier knows; train it on drawings of the things that the "
            "listing of the held-out pictures names, or leave it out"
        )


def recognise(
    classifier: ThingClassifier,
    vqgan: VQGAN,
    attributes: Mapping[str, Attributes],
    best_of: Sequence[int],
    seed: int = 0,
) -> Recognised:
    """Look at the answers to all questions about one thing that the classifier knows; there must be one.

    Against each stand 199 other things that it knows, drawn at random by the seed.
    """
    asked = about_one_thing({name: found.questions for name, found in attributes.items()})
    answers: dict[str, Answer] = {}
    for found in attributes.values():
        for question, answer in zip(found.questions, found.answers, strict=True):
            answers.setdefault(question.prompt, answer)
    known = [question for question in asked if question.things[0] in classifier.row_of]
    names = [question.things[0] for question in known]
    rows = classifier.rows(names)
    others = [classifier.rows(rivals(name, classifier.things, seed)) for name in names]

    def right(pictures: Sequence[Image.Image]) -> Share:
        scores = classifier.scores(pictures).cpu()
        hits = [comes_first(*each) for each in zip(scores, rows.tolist(), others, strict=True)]
        return Share(sum(hits), len(hits))

    def best(count: int) -> list[Image.Image]:
        return [answers[question.prompt].by_count[count] for question in known]

    side = vqgan.config.picture_side
    drawings = torch.stack([torch.tensor(open_pixels(question.drawing, side)).permute(2, 0, 1) for question in known])
    return Recognised(
        by_best_of={count: right(best(count)) for count in best_of},
        on_drawings=right(to_pictures(drawings)),
        on_reconstructions=right(to_pictures(reconstruct(vqgan, drawings)[2])),
        compete=min(COMPETE, len(classifier.things)),
        different_things=len({*names}),
        left_out=len(asked) - len(known),
        classifier_sha256=classifier.sha256,
    )


def rivals(thing: str, things: Sequence[str], seed: int) -> list[str]:
    """At most 199 other things at random, for the same thing and seed the same."""
    others = sorted({*things} - {thing})
    return random.Random(f"{seed}/rivals/{thing}").sample(others, min(COMPETE - 1, len(others)))


def comes_first(scores: Tensor, row: int, others: Tensor) -> bool:
    """Whether of one picture's scores [T] that of thing `row` is larger than those of others, [C]."""
    return bool(scores[row] > scores[others].max())


def to_pictures(pixels: Tensor) -> list[Image.Image]:
    """Of uint8 [N, 3, S, S]."""
    return [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in pixels]
