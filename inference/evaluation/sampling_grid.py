"""Sampling settings compared on the same prompts."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inference.evaluation.attribute_accuracy import measure_attributes
from inference.evaluation.prompt_sampling import PromptSampler
from inference.evaluation.questions import AttributeQuestion
from inference.evaluation.stats import Comparison, compare


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
GRID_PICTURES = 4
"""Pictures per question, of which the best is judged."""


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
