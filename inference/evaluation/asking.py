"""What a model answers: of all pictures of a prompt those that are looked at."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from inference.evaluation.questions import Question
from inference.evaluation.shares import Share
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


def ask_all(
    generator: Generator,
    prompts: Sequence[str],
    settings: Settings,
    best_of: Sequence[int],
    batch_size: int | None = None,
    on_prompt: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """`settings.num_images` pictures of each prompt, as many as the last of `best_of`, with noise of its own."""
    answers = []
    for prompt in prompts:
        seeded = replace(settings, seed=seed_of(settings.seed, prompt))
        answers.append(answer(generator.run(prompt, seeded, batch_size), best_of))
        on_prompt(1)
    return answers


def rights(questions: Sequence[Question], answers: Sequence[Answer], best_of: int) -> list[bool]:
    """Whether the best of the first `best_of` pictures of each question is right."""
    pairs = zip(questions, answers, strict=True)
    return [question.is_right(answered.by_count[best_of]) for question, answered in pairs]
