"""The mean of several peers' tensors, without values that cannot be gradients or weights."""

import asyncio
import math
from collections.abc import Collection

import torch
from hivemind.averaging.partition import TensorPartReducer
from torch import Tensor

MAX_MAGNITUDE = 1e12
"""Weights and gradients stay below. A few larger values could overflow a sum; one ruins its tensor in 8 bits."""


class FiniteMean(TensorPartReducer):
    """The mean, weighted by samples, of the parts whose values are finite and at most MAX_MAGNITUDE.

    If the total weight is 0, the result is nan, which receivers drop.

    Args:
        max_weight: cap on one sender's weight.
        excluded: indices of senders that receive the result but have no weight.
        preferred: indices of senders; if one is there, rules that see all parts at once ignore all others.
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
        """Sum of the weights of each sender's valid parts."""
        self.average = torch.zeros(0)
        """The result for the latest part."""
        super().__init__(part_shapes, num_senders)

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float = 1.0
    ) -> Tensor:
        usable = sender_index not in self.excluded and 0 <= weight < math.inf
        shape = self.part_shapes[part_index]
        fits = tensor_part.shape == shape and tensor_part.is_floating_point()
        # The comparison is also false for nan; an empty part has no maximum.
        if not usable or not fits or not (tensor_part.numel() and tensor_part.abs().max() <= MAX_MAGNITUDE):
            tensor_part, weight = torch.zeros(shape), 0.0
        weight = min(weight, self.max_weight)
        if weight > 0:
            self.counted_weights[sender_index] += weight
            self.take(sender_index, part_index, tensor_part, weight)
        # Shielded: all senders wait for one future, which would be cancelled with the first of their tasks.
        added = super().accumulate_part(sender_index, part_index, tensor_part, weight)
        self.average = await asyncio.shield(added)
        return self.average

    def take(self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float) -> None:
        """Called for each valid part, possibly before all senders have sent the previous ones."""
