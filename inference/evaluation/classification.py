"""Which of 200 things a picture shows, by a classifier that learnt from drawings of other sets.

Shapes: N pictures, T things, C of them that compete.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.thing_classifier import ThingClassifier
from dalle_lean.images.vqgan import VQGAN
from inference.evaluation.attribute_accuracy import AttributeAccuracy
from inference.evaluation.captions import read_pixels
from inference.evaluation.prompt_sampling import Samples
from inference.evaluation.questions import Question
from inference.evaluation.reconstruction import reconstruct
from inference.evaluation.stats import Proportion

CANDIDATES = 200


@dataclass(frozen=True, kw_only=True)
class ClassifierAccuracy:
    """How often the right thing comes first, of all prompts about one thing: on grounds, in colours, of sizes.

    Its fields are those of report.json.
    """

    best_of: dict[int, Proportion]
    """By the number of pictures that the best was chosen from."""
    on_drawings: Proportion
    """Of the real drawings: what the classifier itself can do."""
    on_reconstructions: Proportion
    """Of the real drawings through the tokenizer: the most that a model of its codes can reach."""
    compete: int
    """Things that compete."""
    different_things: int
    """Several prompts may be about the same."""
    left_out: int
    """Prompts about things that the classifier does not know."""
    classifier_sha256: str | None


def check_classifier(questions: Iterable[Question], classifier: ThingClassifier) -> None:
    """ValueError where no question is about a thing that the classifier knows."""
    if not any(len(question.things) == 1 and question.things[0] in classifier.row_of for question in questions):
        raise UserError(
            "no prompt is about one thing that the classifier knows; train it on drawings of the things that the "
            "listing of the held-out pictures names, or leave it out"
        )


def classify(
    classifier: ThingClassifier, vqgan: VQGAN, attributes: Mapping[str, AttributeAccuracy], seed: int = 0
) -> ClassifierAccuracy:
    """Look at what was drawn for each prompt about one thing that the classifier knows; there must be one.

    Each competes with 199 other things that it knows, drawn at random by the seed.
    """
    asked: dict[str, tuple[Question, Samples]] = {}
    for found in attributes.values():
        for question, samples in zip(found.questions, found.samples, strict=True):
            if len(question.things) == 1:
                asked.setdefault(question.prompt, (question, samples))
    known = [(question, samples) for question, samples in asked.values() if question.things[0] in classifier.row_of]
    names = [question.things[0] for question, _ in known]
    rows = classifier.rows(names).tolist()
    others = [classifier.rows(rivals(name, classifier.things, seed)) for name in names]

    def accuracy(pictures: Sequence[Image.Image]) -> Proportion:
        scores = classifier.scores(pictures).cpu()
        return Proportion.of([comes_first(*each) for each in zip(scores, rows, others, strict=True)])

    drawings = read_pixels([question.drawing for question, _ in known], vqgan.config.picture_side)
    return ClassifierAccuracy(
        best_of={count: accuracy([samples.best_of[count] for _, samples in known]) for count in known[0][1].best_of},
        on_drawings=accuracy(to_pictures(drawings)),
        on_reconstructions=accuracy(to_pictures(reconstruct(vqgan, drawings)[2])),
        compete=min(CANDIDATES, len(classifier.things)),
        different_things=len({*names}),
        left_out=len(asked) - len(known),
        classifier_sha256=classifier.sha256,
    )


def rivals(thing: str, things: Sequence[str], seed: int) -> list[str]:
    """At most 199 other things at random, the same for the same thing and seed."""
    others = sorted({*things} - {thing})
    return random.Random(f"{seed}/rivals/{thing}").sample(others, min(CANDIDATES - 1, len(others)))


def comes_first(scores: Tensor, row: int, others: Tensor) -> bool:
    """Whether thing `row` has a higher score than the others [C], of one picture's scores [T]."""
    return bool(scores[row] > scores[others].max())


def to_pictures(pixels: Tensor) -> list[Image.Image]:
    """uint8 [N, 3, S, S] -> N pictures."""
    return [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in pixels]
