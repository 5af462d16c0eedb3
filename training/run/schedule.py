"""What a step does by its number: how fast it learns, and from how much of each sample. The first step is 1."""

import math
from collections.abc import Sequence

import torch

from dalle_lean.model.dalle import Crop


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """Linear from 0 up to `peak` at `warmup_steps`, then linear down towards 0 after `total_steps`.

    Every step of the run learns (none has a rate of exactly 0), and past the end the rate is 0.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    return peak * max(0, total_steps + 1 - step) / (total_steps + 1 - warmup_steps)


def cosine_rate(step: int, *, peak: float, warmup_share: float, total_steps: int) -> float:
    """The learning rate at a step: linear up to `peak`, then half a cosine that reaches 0 after the last step."""
    warmup_steps = max(1, round(warmup_share * total_steps))
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / (total_steps + 1 - warmup_steps)
    return peak * (1 + math.cos(math.pi * done)) / 2


def crop_of_step(step: int, stages: Sequence[tuple[int, int, int]], image_side: int, seed: int) -> Crop | None:
    """The part of each sample that a step learns from, its square of codes anywhere in the picture; None is all.

    Short sequences first (Li et al. 2022, "The Stability-Efficiency Dilemma"). The place follows from the
    seed and the step alone, so that a resumed run draws the same.

    Args:
        stages: (until_step, text_len, side), until_step rising; see ScheduleRecipe.
        image_side: of whole pictures, in codes.
    """
    for until_step, text_len, side in stages:
        if step <= until_step:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
            row, column = torch.randint(image_side - side + 1, (2,), generator=generator).tolist()
            return Crop(text_len, side, row, column)
    return None
