"""Draws pictures for many prompts and keeps only those that are judged or shown."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from dalle_lean.progress import OnBatch, OnProgress, unwatched
from inference.generator import Generator
from inference.request import Picture, Settings

MOST_SHOWN = 4  # the paper shows the best 4 of 128 pictures


@dataclass(frozen=True)
class Samples:
    """The pictures kept of one prompt: all 128 of hundreds of prompts would take gigabytes."""

    best_of: dict[int, Image.Image]  # n -> the highest ranked of the first n pictures
    first: tuple[Image.Image, ...]  # the first few pictures, unranked
    best: tuple[Image.Image, ...]  # equally many, the highest ranked of all

    @classmethod
    def select(cls, ranked: Sequence[Picture], best_of: Sequence[int]) -> "Samples":
        """Select from all pictures of a prompt, given best first."""
        drawn, shown = sorted(ranked, key=lambda picture: picture.index), num_shown(len(ranked))
        return cls(
            {count: next(picture.image for picture in ranked if picture.index < count) for count in best_of},
            tuple(picture.image for picture in drawn[:shown]),
            tuple(picture.image for picture in ranked[:shown]),
        )


def num_shown(num_images: int) -> int:
    """How many of a prompt's pictures a user would see: a quarter, 1 to 4."""
    return min(MOST_SHOWN, max(1, num_images // 4))


def prompt_seed(seed: int, prompt: str) -> int:
    """A seed in 0..2^64-1 for each prompt: with one seed for all, prompts would share noise and so errors."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{prompt}".encode()).digest()[:8], "little")


@dataclass(frozen=True)
class PromptSampler:
    """Draws prompts, each with its own noise, and reports progress."""

    generator: Generator
    settings: Settings = field(default_factory=Settings)
    batch_size: int | None = None
    on_progress: OnProgress = unwatched

    def counter(self, note: str, total: int) -> OnBatch:
        """A callback that takes the number of items newly done."""
        so_far = 0

        def count(done: int) -> None:
            nonlocal so_far
            so_far += done
            self.on_progress(so_far, total, note)

        return count

    def draw(self, prompts: Sequence[str], note: str, best_of: Sequence[int], **changes: Any) -> list[Samples]:
        """Draw as many pictures of each prompt as the last of `best_of` says, with `changes` to the settings."""
        settings = replace(self.settings, num_images=best_of[-1], best=best_of[-1], **changes)
        samples, count = [], self.counter(note, len(prompts))
        for prompt in prompts:
            seeded = replace(settings, seed=prompt_seed(settings.seed, prompt))
            samples.append(Samples.select(self.generator.run(prompt, seeded, self.batch_size), best_of))
            count(1)
        return samples
