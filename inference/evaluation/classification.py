"""Which thing a picture shows, by classifiers that never saw the drawn pictures: among 200 things, and among all.

A classifier that learnt from scenes of the same drawings, from another seed, has seen some of the real held-out ones to
the pixel: what it finds of those is no measure of how it would do on others.

Shapes: N pictures, S side in pixels, T things.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.thing_classifier import ThingClassifier
from dalle_lean.images.vqgan import VQGAN
from inference.evaluation.attribute_accuracy import AttributeAccuracy
from inference.evaluation.captions import Line, read_lines, read_pixels, sample
from inference.evaluation.prompt_sampling import Samples
from inference.evaluation.questions import Question, question_of
from inference.evaluation.reconstruction import reconstruct
from inference.evaluation.stats import Proportion

CANDIDATES = 200
HELD_OUT_PAIRS = "on grounds and in colours it was never seen in"


class PromptKind(NamedTuple):
    """Prompts about one thing each."""

    folder: str  # train or heldout
    wanted: Callable[[Line], bool]
    """Whether a line of the folder's listing is one of them."""
    frames: tuple[str, ...] = ("{text}",)
    """The prompts that are made of a line, in turns: of its caption {text} or the name {thing}."""


OTHER_PROMPTS = {
    "on grounds it was seen on": PromptKind("train", lambda line: line["kind"] == "scene"),
    "asked for with words that training hardly showed": PromptKind(
        "train",
        lambda line: line["kind"] == "plain",
        (
            "my happy {thing}",
            "the fluffy {thing}",
            "a cute {thing} in the countryside",
            "an elegant {thing} for grandma",
            "please draw a lovely {thing}!",
            "{thing} enjoying holidays",
        ),
    ),
    "never seen at all": PromptKind("heldout", lambda line: line["held_out"] == "concept"),
}

Drawn = Sequence[tuple[Question, Samples]]


@dataclass(frozen=True, kw_only=True)
class ThingAccuracy:
    """How often a classifier ranks the right thing first; the fields are those of report.json."""

    judge: str
    prompts: str  # the kind of prompts: HELD_OUT_PAIRS or one of OTHER_PROMPTS
    among: int  # candidate things
    best_of: dict[int, Proportion]  # by the number of pictures from which the best was chosen
    on_drawings: Proportion  # on the real drawings: the classifier's own accuracy
    on_reconstructions: Proportion
    """On the real drawings through the tokenizer: the most that a model of its codes can reach."""
    different_things: int  # fewer than prompts if several are about the same thing
    left_out: int  # prompts about things that the classifier does not know
    classifier_sha256: str | None


def check_classifier(name: str, questions: Iterable[Question], classifier: ThingClassifier) -> None:
    """ValueError if no question is about one thing that the classifier knows."""
    if not any(len(question.things) == 1 and question.things[0] in classifier.row_of for question in questions):
        raise UserError(
            f"no prompt is about one thing that the classifier {name} knows; train it on drawings of the things in "
            "the listing of the held-out pictures, or leave it out"
        )


def choose_thing_questions(folder: Path, of_each: int, seed: int) -> dict[str, list[Question]]:
    """At most `of_each` different questions about one thing for each of OTHER_PROMPTS in the data."""
    found = {}
    for name, (part, wanted, frames) in OTHER_PROMPTS.items():
        alone = [line for line in read_lines(folder / part) if "kind" in line and len(line["things"]) == 1]
        different = {line["text"]: line for line in alone if wanted(line)}
        lines = sample(list(different.values()), of_each, f"{seed}/{name}")
        found[name] = [
            replace(question_of(folder / part, line), prompt=frame.format(text=line["text"], thing=line["things"][0]))
            for line, frame in zip(lines, cycle(frames), strict=False)
        ]
    return {name: questions for name, questions in found.items() if questions}


def single_thing_samples(attributes: Mapping[str, AttributeAccuracy]) -> Drawn:
    """Every prompt about one thing that is to be drawn once, with its samples; classifiers know no others."""
    asked: dict[str, tuple[Question, Samples]] = {}
    for name, found in attributes.items():
        for question, samples in zip(found.questions, found.samples, strict=True):
            if len(question.things) == 1 and name != "count":
                asked.setdefault(question.prompt, (question, samples))
    return list(asked.values())


def judge_things(
    judge: str, classifier: ThingClassifier, vqgan: VQGAN, prompts: str, drawn: Drawn, seed: int = 0
) -> list[ThingAccuracy]:
    """Accuracy on the prompts about things that the classifier knows: among the right thing and 199 others, drawn by
    the seed, and among all things; once if it knows at most 200, empty if it knows none of the prompts' things."""
    known = [(question, samples) for question, samples in drawn if question.things[0] in classifier.row_of]
    if not known:
        return []
    names = [question.things[0] for question, _ in known]
    drawings = read_pixels([question.drawing for question, _ in known], vqgan.config.picture_side)
    scores_of_drawings = classifier.scores(to_pictures(drawings))
    scores_of_reconstructions = classifier.scores(to_pictures(reconstruct(vqgan, drawings)[2]))
    counts = known[0][1].best_of
    scores_of_best = {count: classifier.scores([samples.best_of[count] for _, samples in known]) for count in counts}

    def accuracies(candidates: int) -> ThingAccuracy:
        others = [distractors(name, classifier.things, seed, candidates - 1) for name in names]

        def accuracy(scores: Tensor) -> Proportion:
            pairs = zip(scores.cpu(), names, others, strict=True)
            return Proportion.of([ranks_first(classifier, row, name, against) for row, name, against in pairs])

        return ThingAccuracy(
            judge=judge,
            prompts=prompts,
            among=candidates,
            best_of={count: accuracy(scores) for count, scores in scores_of_best.items()},
            on_drawings=accuracy(scores_of_drawings),
            on_reconstructions=accuracy(scores_of_reconstructions),
            different_things=len({*names}),
            left_out=len(drawn) - len(known),
            classifier_sha256=classifier.sha256,
        )

    return [accuracies(among) for among in sorted({min(CANDIDATES, len(classifier.things)), len(classifier.things)})]


def distractors(thing: str, things: Sequence[str], seed: int, count: int) -> list[str]:
    """`count` other things at random, the same for equal thing and seed."""
    return random.Random(f"{seed}/rivals/{thing}").sample(sorted({*things} - {thing}), count)


def ranks_first(classifier: ThingClassifier, scores: Tensor, thing: str, others: Sequence[str]) -> bool:
    """Whether, in one picture's scores [T], a thing scores higher than all others."""
    return bool(scores[classifier.row_of[thing]] > scores[classifier.rows(others)].max())


def to_pictures(pixels: Tensor) -> list[Image.Image]:
    """uint8 [N, 3, S, S] -> N PIL images."""
    return [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in pixels]
