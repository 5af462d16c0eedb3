"""Aggregation rules: they reduce the tensors of several peers to one, without values that cannot be gradients or
weights. A minority cannot steer the result of the robust ones.

N is the number of senders, n the number of values of a part. The result does not depend on the order of arrival. To add
a rule, put its class into `RULES` and its name into training.swarm.config.
"""

import asyncio
import math
from collections.abc import Collection
from typing import Any

import torch
from hivemind.averaging.partition import TensorPartReducer
from torch import Tensor

from training.swarm.config import AGGREGATIONS, SwarmSettings

MAX_MAGNITUDE = 1e12
"""Weights and gradients stay below. A few larger values could overflow a sum; one ruins its tensor in 8 bits."""
MAX_WEIGHT_RATIO = 2.0  # cap on one sender's weight, relative to the median weight
MIN_WEIGHT_SHARE = 1e-3
"""Of the largest weight; a sender below it has stale weights and is ignored if others have newer ones."""
CLIPPING_ROUNDS = 3
REJECT_RADII = 4.0  # parts farther than this many radii from the centre have no weight
TRIMMED_SHARE = 0.25  # share of the senders that is trimmed at each end
PRODUCT_COLUMNS = 65_536  # values of each sender converted to float64 at once


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
        self.counted_weights = [0.0] * num_senders  # sum of the weights of each sender's valid parts
        self.average = torch.zeros(0)  # the result for the latest part
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


class CollectingRule(FiniteMean):
    """Collects each part from all senders, then combines them at once; with only two senders, the plain mean.

    Ignores senders with stale weights if others have newer ones, and all others if `preferred` senders are there.
    """

    def __init__(self, *arguments: Any, **options: Any):
        self.received: dict[int, dict[int, tuple[Tensor, float]]] = {}
        """By part, since some senders are ahead of others, and by sender."""
        super().__init__(*arguments, **options)

    def combine(self, parts: Tensor, weights: Tensor) -> Tensor:
        """Combine parts [N, n], N > 2, with positive weights [N] into [n]."""
        raise NotImplementedError

    def take(self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float) -> None:
        self.received.setdefault(part_index, {})[sender_index] = (tensor_part, weight)

    def check_current_part_finished(self) -> None:
        if self.current_part_accumulated_from == self.num_current_senders:
            sent = self.received.pop(self.current_part_index, {})
            least = MIN_WEIGHT_SHARE * max((weight for _, weight in sent.values()), default=0.0)
            current = {sender for sender, (_, weight) in sent.items() if weight >= least}
            chosen = sorted(current.intersection(self.preferred) or current)
            if len(chosen) > 2 or len(chosen) < len(sent):
                parts = torch.stack([sent[sender][0].flatten().float() for sender in chosen])
                weights = torch.tensor([sent[sender][1] for sender in chosen])
                if len(chosen) > 2:
                    combined = self.combine(parts, cap_weights(weights))
                else:
                    combined = weights / weights.sum() @ parts
                self.accumulator = combined.view(self.part_shapes[self.current_part_index])
                self.denominator = 1.0
        super().check_current_part_finished()


class CentredClipping(CollectingRule):
    """Centred clipping (Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", section 4):
    the mean of the parts, each clipped to a radius around the centre.

    The initial centre is the part closest to the others; the radius is the median distance from the centre.
    """

    radius_share = 1.0
    """The radius, relative to the median distance."""

    def combine(self, parts: Tensor, weights: Tensor) -> Tensor:
        centre = parts[pairwise_distances(parts).quantile(0.5, dim=1).argmin()]
        for _ in range(CLIPPING_ROUNDS):
            offsets = parts - centre
            distances = offsets.norm(dim=1)
            # Zeros count: if most peers agree, the one that lies must not set the radius.
            radius = self.radius_share * distances.median()
            shares = weights * (radius / distances.clamp(min=1e-30)).clamp(max=1.0)
            shares[distances > REJECT_RADII * radius] = 0.0
            centre = centre + (shares / weights.sum()) @ offsets
        return centre


class TighterClipping(CentredClipping):
    """For a run that was rolled back because its loss had risen."""

    radius_share = 0.5


class TrimmedMean(CollectingRule):
    """Coordinate-wise trimmed mean (Yin et al. 2018, definition 2); ignores the senders' weights."""

    def combine(self, parts: Tensor, weights: Tensor) -> Tensor:
        trimmed = max(1, int(len(parts) * TRIMMED_SHARE))
        return parts.sort(dim=0).values[trimmed : len(parts) - trimmed].mean(0)


class Median(CollectingRule):
    """Coordinate-wise median (Yin et al. 2018, definition 1); ignores the senders' weights."""

    def combine(self, parts: Tensor, weights: Tensor) -> Tensor:
        return parts.quantile(0.5, dim=0)


RULES: dict[str, type[FiniteMean]] = {
    "centred_clipping": CentredClipping,
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "mean": FiniteMean,
}
assert set(RULES) == set(AGGREGATIONS)


def rule_of(settings: SwarmSettings) -> type[FiniteMean]:
    """The rule that a run's settings name; tighter after a rollback, which all peers see by the run's name."""
    if settings.wire.aggregation == "centred_clipping" and settings.swarm.rollbacks:
        return TighterClipping
    return RULES[settings.wire.aggregation]


def pairwise_distances(parts: Tensor) -> Tensor:
    """Euclidean distances between the rows of [N, n]: [N, N] float64, from the Gram matrix.

    In float64, because differences between weights are small compared to the weights.
    """
    products = torch.zeros(len(parts), len(parts), dtype=torch.float64, device=parts.device)
    for columns in parts.split(PRODUCT_COLUMNS, dim=1):
        wide = columns.double()
        products.addmm_(wide, wide.T)
    squares = products.diagonal()
    return (squares[:, None] + squares - 2 * products).clamp(min=0).sqrt()


def cap_weights(weights: Tensor) -> Tensor:
    """Weights [N], capped at MAX_WEIGHT_RATIO times their median."""
    return weights.clamp(max=MAX_WEIGHT_RATIO * float(weights.quantile(0.5)))
