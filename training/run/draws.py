"""Random draws of a step: seed and step alone determine them, so that a resumed run draws the same."""

from collections.abc import Sequence

import torch

from dalle_lean.model.dalle import Crop


def step_generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)


def crop_of_step(step: int, stages: Sequence[tuple[int, int, int]], image_side: int, seed: int) -> Crop | None:
    """The crop of each sample that a step, counted from 1, learns from; None means whole samples.

    Short sequences come first (Li et al. 2022, "The Stability-Efficiency Dilemma"). The square of codes lies anywhere
    in the picture.

    Args:
        stages: (until_step, text_len, side) in ascending order of until_step; see ScheduleRecipe.
        image_side: of whole pictures, in codes.
    """
    for until_step, text_len, side in stages:
        if step <= until_step:
            place = torch.randint(image_side - side + 1, (2,), generator=step_generator(seed, step))
            row, column = place.tolist()
            return Crop(text_len, side, row, column)
    return None
