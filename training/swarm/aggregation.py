"""Rules that make one tensor of what several peers sent.

A rule is a hivemind TensorPartReducer: it gets one part of a tensor from each sender and gives the part that all of
them go on with. Another rule is another class in `RULES`, with its name in training.swarm.settings.
"""

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import TensorPartReducer
from torch import Tensor

from training.swarm.settings import AGGREGATIONS


class FiniteMean(TensorPartReducer):
    """The mean, weighted by the senders' samples, of the parts that are finite.

    Where nobody sent anything of weight the result is nan, which receivers do not take.
    """

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float = 1.0
    ) -> Tensor:
        if not (0 <= weight < float("inf")) or not torch.isfinite(tensor_part).all():
            tensor_part, weight = torch.zeros_like(tensor_part), 0.0
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight)


RULES: dict[str, type[TensorPartReducer]] = {"mean": FiniteMean}
assert set(RULES) == set(AGGREGATIONS)


class RuleRunner(AllReduceRunner):
    """hivemind's all-reduce with a rule of ours for the parts that this peer reduces."""

    tensor_part_reducer: TensorPartReducer

    def __init__(self, *, rule: type[TensorPartReducer], **arguments: object):
        super().__init__(**arguments)
        self.tensor_part_reducer.finished.set()  # so that it leaves without a word
        shapes = tuple(part.shape for part in self.parts_for_local_averaging)
        self.tensor_part_reducer = rule(shapes, len(self.sender_peer_ids))
