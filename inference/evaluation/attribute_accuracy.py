"""How often pictures show the ground, colour, size or side that prompts name, and with which sampling settings."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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


class SamplingSetting(NamedTuple):
    """How codes are drawn; the defaults turn each option off."""

    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    guidance: float = 1.0

    def __str__(self) -> str:
        on = [f"{name.replace('_', '-')} {value:g}" for name, value in self._asdict().items() if value not in (0, 1)]
        return ", ".join(on) or "all codes"


Grid = dict[SamplingSetting, dict[str, list[bool]]]
"""For each setting and attribute, whether each question's picture is right."""

FREE, PAPER = SamplingSetting(), SamplingSetting(256, 0.75)
UNGUIDED = (
    *(FREE, SamplingSetting(256), SamplingSetting(0, 0.75)),
    *(PAPER, SamplingSetting(256, 0.75, 0.7), SamplingSetting(64, 0.5)),
)
GUIDED = (PAPER._replace(guidance=2.0), PAPER._replace(guidance=4.0))
GUIDED_TOP_K = SamplingSetting(256, guidance=2.0)
GRID_PICTURES = 4  # pictures per question, of which the best is judged


def settings_to_try(caption_dropout: float | None) -> tuple[SamplingSetting, ...]:
    """The settings for a model; with guidance only if it was trained with caption dropout."""
    return (*UNGUIDED, *GUIDED, GUIDED_TOP_K) if caption_dropout else UNGUIDED


def measure_grid(sampler: PromptSampler, questions: Mapping[str, list[AttributeQuestion]]) -> Grid:
    """Draw the same questions with each setting; empty without questions."""
    pictures = min(GRID_PICTURES, sampler.settings.num_images)
    grid: Grid = {}
    for setting in settings_to_try(sampler.generator.caption_dropout) if questions else ():
        found = measure_attributes(sampler, questions, f"{setting}: questions", (pictures,), **setting._asdict())
        grid[setting] = {name: accuracy.hits(pictures) for name, accuracy in found.items()}
    return grid


def compare_settings(grid: Mapping[SamplingSetting, Mapping[str, Sequence[bool]]]) -> list[Comparison]:
    """Compare filters with drawing from all codes, guidance with none, and top-p under guidance with none."""
    hits = {setting: [hit for found in by_name.values() for hit in found] for setting, by_name in grid.items()}
    pairs = [(FREE, UNGUIDED[1]), (FREE, UNGUIDED[2]), (FREE, PAPER), *((PAPER, guided) for guided in GUIDED)]
    pairs.append((GUIDED_TOP_K, GUIDED[0]))
    return [compare(f"{new} does better than {base}", hits[new], hits[base]) for base, new in pairs if new in hits]
