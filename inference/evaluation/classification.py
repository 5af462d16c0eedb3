"""Which thing a picture shows, by classifiers that never saw what is judged: among 200 things, and among all they know.

Shapes: N pictures, T things, C of them that compete.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.images.thing_classifier import ThingClassifier
from dalle_lean.images.vqgan import VQGAN
from inference.evaluation.attribute_accuracy import AttributeAccuracy
from inference.evaluation.captions import read_lines, read_pixels, sample
from inference.evaluation.prompt_sampling import Samples
from inference.evaluation.questions import Question, question_of
from inference.evaluation.reconstruction import reconstruct
from inference.evaluation.stats import Proportion

CANDIDATES = 200
HELD_OUT_PAIRS = "on grounds and in colours it was never seen in"
OTHER_PROMPTS = {
    "on grounds it was seen on": ("train", lambda line: line["kind"] == "scene"),
    "never seen at all": ("heldout", lambda line: line["held_out"] == "concept"),
}
"""About one thing each: the folder, and which of its lines."""

Drawn = Sequence[tuple[Question, Samples]]


@dataclass(frozen=True, kw_only=True)
class ThingAccuracy:
    """How often a classifier finds the right thing first.

    Its fields are those of report.json.
    """

    judge: str
    prompts: str
    """What they have in common: HELD_OUT_PAIRS or one of OTHER_PROMPTS."""
    among: int
    """Things that compete."""
    best_of: dict[int, Proportion]
    """By the number of pictures that the best was chosen from."""
    on_drawings: Proportion
    """Of the real drawings: what the classifier itself can do."""
    on_reconstructions: Proportion
    """Of the real drawings through the tokenizer: the most that a model of its codes can reach."""
    different_things: int
    """Several prompts may be about the same."""
    left_out: int
    """Prompts about things that the classifier does not know."""
    classifier_sha256: str | None


def check_classifier(name: str, questions: Iterable[Question], classifier: ThingClassifier) -> None:
    """ValueError where no question is about a thing that the classifier knows."""
    if not any(len(question.things) == 1 and question.things[0] in classifier.row_of for question in questions):
        raise UserError(
            f"no prompt is about one thing that the classifier {name} knows; train it on drawings of the things that "
            "the listing of the held-out pictures names, or leave it out"
        )


def choose_thing_questions(folder: Path, of_each: int, seed: int) -> dict[str, list[Question]]:
    """At most `of_each` of OTHER_PROMPTS that the data has, all different and about one thing each."""
    found = {}
    for name, (part, wanted) in OTHER_PROMPTS.items():
        alone = [line for line in read_lines(folder / part) if "kind" in line and len(line["things"]) == 1]
        different = {line["text"]: line for line in alone if wanted(line)}
        lines = sample(list(different.values()), of_each, f"{seed}/{name}")
        found[name] = [question_of(folder / part, line) for line in lines]
    return {name: questions for name, questions in found.items() if questions}


def drawn_alone(attributes: Mapping[str, AttributeAccuracy]) -> Drawn:
    """Every prompt about one thing, once, with what was drawn for it."""
    asked: dict[str, tuple[Question, Samples]] = {}
    for found in attributes.values():
        for question, samples in zip(found.questions, found.samples, strict=True):
            if len(question.things) == 1:
                asked.setdefault(question.prompt, (question, samples))
    return list(asked.values())


def judge_things(
    judge: str, classifier: ThingClassifier, vqgan: VQGAN, prompts: str, drawn: Drawn, seed: int = 0
) -> list[ThingAccuracy]:
    """Of the prompts about things that the classifier knows: among 200 things, of which 199 are drawn at random by the
    seed, and among all; once where it knows fewer. Empty where it knows none of them."""
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
        others = [rivals(name, classifier.things, seed, candidates - 1) for name in names]

        def accuracy(scores: Tensor) -> Proportion:
            pairs = zip(scores.cpu(), names, others, strict=True)
            return Proportion.of([comes_first(classifier, row, name, against) for row, name, against in pairs])

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


def rivals(thing: str, things: Sequence[str], seed: int, count: int) -> list[str]:
    """`count` other things at random, the same for the same thing and seed."""
    return random.Random(f"{seed}/rivals/{thing}").sample(sorted({*things} - {thing}), count)


def comes_first(classifier: ThingClassifier, scores: Tensor, thing: str, others: Sequence[str]) -> bool:
    """Whether a thing has a higher score than the others, of one picture's scores [T]."""
    return bool(scores[classifier.row_of[thing]] > scores[classifier.rows(others)].max())


def to_pictures(pixels: Tensor) -> list[Image.Image]:
    """uint8 [N, 3, S, S] -> N pictures."""
    return [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in pixels]
