"""How often a prompt's picture shows the ground, colour, size or side that it names."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inference.evaluation.captions import open_drawing
from inference.evaluation.prompt_sampling import PromptSampler, Samples, num_shown
from inference.evaluation.questions import AttributeQuestion
from inference.evaluation.stats import Comparison, Proportion, compare


@dataclass(frozen=True)
class AttributeAccuracy:
    """The questions of one attribute, and what was drawn for them."""

    questions: list[AttributeQuestion]
    samples: list[Samples]

    def hits(self, best_of: int) -> list[bool]:
        """For each question, whether the best of its first `best_of` pictures is right."""
        pairs = zip(self.questions, self.samples, strict=True)
        return [question.is_right(samples.best_of[best_of]) for question, samples in pairs]

    @cached_property
    def by_best_of(self) -> dict[int, Proportion]:
        """Questions whose picture is right, by the number of pictures from which the best was chosen."""
        return {count: Proportion.of(self.hits(count)) for count in self.samples[0].best_of}

    @property
    def commonest_answer(self) -> Proportion:
        """Questions for which the commonest answer to all of them is right: a baseline that ignores the prompt."""
        expected = Counter(question.expected for question in self.questions)
        return Proportion(max(expected.values()), len(self.questions))


def accuracy_on_drawings(questions: Sequence[AttributeQuestion]) -> Proportion:
    """Questions that the pixel judge answers rightly on the real drawings: its own accuracy."""
    return Proportion.of([question.is_right(open_drawing(question.drawing)) for question in questions])


def measure_attributes(
    sampler: PromptSampler,
    questions: Mapping[str, list[AttributeQuestion]],
    note: str,
    best_of: tuple[int, ...],
    **changes: Any,
) -> dict[str, AttributeAccuracy]:
    """Draw the questions of each attribute, with `changes` to the sampler's settings."""
    return {
        name: AttributeAccuracy(asked, sampler.draw([q.prompt for q in asked], f"{note} of {name}", best_of, **changes))
        for name, asked in questions.items()
    }


def compare_ranking(ranker: str, accuracies: Iterable[AttributeAccuracy]) -> list[Comparison]:
    """Whether a prompt's best few pictures are right more often than its first few; empty if only one is drawn."""
    pairs = [pair for found in accuracies for pair in zip(found.questions, found.samples, strict=True)]
    count = max((max(samples.best_of) for _, samples in pairs), default=1)
    if count == 1:
        return []
    return [
        compare(
            f"To choose the best {num_shown(count)} of {count} pictures by {ranker} helps",
            [sum(map(question.is_right, samples.best)) for question, samples in pairs],
            [sum(map(question.is_right, samples.first)) for question, samples in pairs],
        )
    ]
