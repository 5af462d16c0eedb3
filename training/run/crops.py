"""The part of its samples that a step learns from, by its number; the first step is 1."""

from collections.abc import Sequence

import torch

from dalle_lean.model.dalle import Crop


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
