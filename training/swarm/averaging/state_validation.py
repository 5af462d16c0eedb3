"""Whether another peer's weights can be trusted: their loss on samples that nobody trains on."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from training.data.loader import Batch
from training.step.gradients import GradientComputer
from training.swarm.averaging.averagers import StateRefused

WORST_RATIO = 1.2
"""A downloaded state may be so much worse than one's own on held-out samples, chance included."""


def judge(gradients: GradientComputer, heldout: Batch, own: Sequence[Tensor], offered: Sequence[Tensor]) -> None:
    """StateRefused where held-out samples say that the offered parameters are much worse than the present ones.

    Args:
        own: the parameters of the model of `gradients`, in the order of `offered`; they are afterwards as before.
    """
    before = gradients.measure(heldout)["heldout_loss"]
    kept = [parameter.detach().clone() for parameter in own]
    try:
        copy_all(own, offered)
        after = gradients.measure(heldout)["heldout_loss"]
    finally:
        copy_all(own, kept)
    if not (after <= WORST_RATIO * before or (math.isfinite(after) and not math.isfinite(before))):
        raise StateRefused(f"has a held-out loss of {after:.3g}, the present weights {before:.3g}")


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Each source into its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
