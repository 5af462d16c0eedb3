"""What a model answers: of all pictures of a prompt those that are looked at."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from dalle_lean.progress import OnProgress
from inference.evaluation.proportions import Share
from inference.evaluation.questions import Question
from inference.generator import Generator, Picture, Settings

FEW = 4
"""So many pictures of a prompt the paper shows."""


@dataclass(frozen=True)
class Answer:
    """To one prompt. The other pictures are let go: of hundreds of prompts, 128 each would be gigabytes."""

    by_count: dict[int, Image.Image]
    """Of the first so many pictures the one that the ranker likes best."""
    first: tuple[Image.Image, ...]
    """The first few, as they come."""
    best: tuple[Image.Image, ...]
    """As many, the best of all."""


@dataclass(frozen=True)
class Attributes:
    """Questions of one attribute, and what was answered."""

    questions: list[Question]
    answers: list[Answer]
    by_best_of: dict[int, Share]
    on_drawings: Share
    """The same judge on the real drawings."""
    commonest: Share
    """What is right when the answer is the same each time."""


def answer(ranked: Sequence[Picture], best_of: Sequence[int]) -> Answer:
    """From all pictures of a prompt, best first."""
    drawn = sorted(ranked, key=lambda picture: picture.index)
    few = few_of(len(ranked))
    return Answer(
        {count: next(picture.image for picture in ranked if picture.index < count) for count in best_of},
        tuple(picture.image for picture in drawn[:few]),
        tuple(picture.image for picture in ranked[:few]),
    )


def seed_of(seed: int, prompt: str) -> int:
    """0..2^64-1. Under one seed the pictures of all prompts would share their noise, and their luck."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt}".encode()).digest()[:8], "little")


def few_of(count: int) -> int:
    """How many of so many pictures are shown: a quarter, at most 4."""
    return min(FEW, max(1, count // 4))


@dataclass(frozen=True)
class Asker:
    """Draws prompts, each with noise of its own, and tells how far it is."""

    generator: Generator
    batch_size: int | None = None
    on_progress: OnProgress | None = None

    def progress(self, what: str, total: int) -> Callable[[int], None]:
        """To be called with how many more are done."""
        so_far = [0]

        def count(done: int) -> None:
            so_far[0] += done
            if self.on_progress is not None:
                self.on_progress(so_far[0], total, what)

        return count

    def draw(self, prompts: Sequence[str], what: str, settings: Settings, best_of: Sequence[int]) -> list[Answer]:
        """`settings.num_images` pictures of each prompt, as many as the last of `best_of`."""
        answers, count = [], self.progress(what, len(prompts))
        for prompt in prompts:
            seeded = replace(settings, seed=seed_of(settings.seed, prompt))
            answers.append(answer(self.generator.run(prompt, seeded, self.batch_size), best_of))
            count(1)
        return answers

    def ask(self, questions: Sequence[Question], what: str, settings: Settings, best_of: Sequence[int]) -> list[Answer]:
        """The same of the prompts of questions of one attribute."""
        prompts = [question.prompt for question in questions]
        return self.draw(prompts, f"{what} of {questions[0].attribute}", settings, best_of)


def rights(questions: Sequence[Question], answers: Sequence[Answer], best_of: int) -> list[bool]:
    """Whether the best of the first `best_of` pictures of each question is right."""
    pairs = zip(questions, answers, strict=True)
    return [question.is_right(answered.by_count[best_of]) for question, answered in pairs]
