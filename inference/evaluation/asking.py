"""What a model answers: pictures of every prompt, ranked, so that the best of any number of them can be told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from PIL import Image

from inference.evaluation.questions import Question
from inference.evaluation.shares import Share
from inference.generator import Generator, Picture, Settings


@dataclass(frozen=True)
class Answer:
    """All pictures of a prompt."""

    pictures: tuple[Picture, ...]
    """By their index."""

    def best_of(self, count: int) -> Image.Image:
        """The one of the first `count` that the model's ranker likes best; the first one where nothing ranks them."""
        first = self.pictures[:count]
        return max(first, key=lambda picture: 0.0 if picture.score is None else picture.score).image


@dataclass(frozen=True)
class Attributes:
    """Questions of one attribute, and what was answered."""

    questions: list[Question]
    answers: list[Answer]
    by_best_of: dict[int, Share]
    on_drawings: Share


def ask_all(
    generator: Generator,
    prompts: Sequence[str],
    settings: Settings,
    batch_size: int | None = None,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """`settings.num_images` pictures of each prompt, kept whole: one where nothing ranks them."""
    answers = []
    for done, prompt in enumerate(prompts, start=1):
        pictures = generator.run(prompt, settings, batch_size)
        answers.append(Answer(tuple(sorted(pictures, key=lambda picture: picture.index))))
        on_prompt(done)
    return answers


def share_right(questions: Sequence[Question], answers: Sequence[Answer], best_of: int) -> Share:
    """Of the best of the first `best_of` pictures of each question."""
    hits = sum(question.is_right(answer.best_of(best_of)) for question, answer in zip(questions, answers, strict=True))
    return Share(hits, len(questions))
