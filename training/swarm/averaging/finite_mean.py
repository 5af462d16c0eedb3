"""The mean of what several peers sent, without what cannot be a gradient or a weight."""

import asyncio
import math
from collections.abc import Collection

import torch
from hivemind.averaging.partition import TensorPartReducer
from torch import Tensor

MAX_MAGNITUDE = 1e12
"""Weights and gradients stay below it. A few larger numbers could overflow a sum; one ruins its tensor in 8 bits."""


class FiniteMean(TensorPartReducer):
    """The mean, weighted by samples, of the parts whose numbers are finite and at most MAX_MAGNITUDE.

    If no sender contributes any weight the result is nan, which receivers drop.

    Args:
        max_weight: cap on one sender's weight.
        excluded: indices of senders that receive the result and count for nothing.
        preferred: indices of senders beside whom nobody else counts, by the rules that see all parts at once.
    """

    def __init__(
        self,
        part_shapes: tuple[torch.Size, ...],
        num_senders: int,
        *,
        max_weight: float = math.inf,
        excluded: Collection[int] = (),
        preferred: Collection[int] = (),
    ):
        self.max_weight, self.excluded, self.preferred = max_weight, excluded, preferred
        self.counted_weights = [0.0] * num_senders
        """Of each sender's usable parts, summed."""
        self.average = torch.zeros(0)
        """Of the latest part."""
        super().__init__(part_shapes, num_senders)

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float = 1.0
    ) -> Tensor:
        usable = sender_index not in self.excluded and 0 <= weight < math.inf
        shape = self.part_shapes[part_index]
        fits = tensor_part.shape == shape and tensor_part.is_floating_point()
        # The comparison is false for nan too; an empty part has no maximum.
        if not usable or not fits or not (tensor_part.numel() and tensor_part.abs().max() <= MAX_MAGNITUDE):
            tensor_part, weight = torch.zeros(shape), 0.0
        weight = min(weight, self.max_weight)
        if weight > 0:
            self.counted_weights[sender_index] += weight
            self.take(sender_index, part_index, tensor_part, weight)
        # Shielded: all senders wait for one future, which is cancelled with the first of their tasks that is.
        added = super().accumulate_part(sender_index, part_index, tensor_part, weight)
        self.average = await asyncio.shield(added)
        return self.average

    def take(self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float) -> None:
        """Called for each usable part, possibly before all senders have sent the parts before it."""
