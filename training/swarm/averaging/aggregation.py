"""Rules that make one tensor of what several peers sent.

A rule is a hivemind TensorPartReducer with the arguments of FiniteMean: it gets one part of a tensor from each sender
and gives the part that all of them go on with. Another rule is another class in `RULES`, with its name in
training.swarm.config.
"""

import math
from collections.abc import Collection

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import TensorPartReducer
from hivemind.p2p import PeerID
from torch import Tensor

from training.swarm.config import AGGREGATIONS

LARGEST = 1e12
"""No weight and no gradient is as large; a few of them could overflow a sum, and one spoils its tensor in 8 bits."""


class FiniteMean(TensorPartReducer):
    """The mean, weighted by the senders' samples, of the parts whose numbers are finite and at most LARGEST.

    Where nobody sent anything of weight the result is nan, which receivers do not take.

    Args:
        largest_weight: what a sender counts for at most.
        left_out: numbers of senders that get the result and count for nothing.
    """

    def __init__(
        self,
        part_shapes: tuple[torch.Size, ...],
        num_senders: int,
        *,
        largest_weight: float = math.inf,
        left_out: Collection[int] = (),
    ):
        self.largest_weight, self.left_out = largest_weight, left_out
        super().__init__(part_shapes, num_senders)

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float = 1.0
    ) -> Tensor:
        usable = sender_index not in self.left_out and 0 <= weight < math.inf
        shape = self.part_shapes[part_index]
        fits = tensor_part.shape == shape and tensor_part.is_floating_point()
        # Not so for nan either; an empty part has no largest number.
        if not usable or not fits or not (tensor_part.numel() and tensor_part.abs().max() <= LARGEST):
            tensor_part, weight = torch.zeros(shape), 0.0
        return await super().accumulate_part(sender_index, part_index, tensor_part, min(weight, self.largest_weight))


RULES: dict[str, type[FiniteMean]] = {"mean": FiniteMean}
assert set(RULES) == set(AGGREGATIONS)


class RuleRunner(AllReduceRunner):
    """hivemind's all-reduce with a rule of ours for the parts that this peer reduces."""

    tensor_part_reducer: TensorPartReducer

    def __init__(
        self,
        *,
        rule: type[FiniteMean],
        largest_weight: float = math.inf,
        left_out: Collection[PeerID] = (),
        **arguments: object,
    ):
        super().__init__(**arguments)
        self.tensor_part_reducer.finished.set()  # so that it leaves without a word
        shapes = tuple(part.shape for part in self.parts_for_local_averaging)
        self.tensor_part_reducer = rule(
            shapes,
            len(self.sender_peer_ids),
            largest_weight=largest_weight,
            left_out=[number for number, peer in enumerate(self.sender_peer_ids) if peer in left_out],
        )
