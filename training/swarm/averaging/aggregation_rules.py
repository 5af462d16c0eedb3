"""Aggregation rules: they reduce what several peers sent to one tensor, and leave out values that cannot be gradients
or weights. A minority cannot steer the result of any rule but the mean.

N senders, n values in a part. The result does not depend on the order of arrival.
"""

import asyncio
import math
from collections.abc import Callable, Collection
from functools import partial

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


Combine = Callable[[Tensor, Tensor], Tensor]
"""Combines parts [N, n], N > 2, with positive weights [N] into [n]."""


class PartReducer(TensorPartReducer):
    """Reduces the parts whose values are finite and at most MAX_MAGNITUDE: to their mean, weighted by samples, or by
    `combine`.

    Without `combine`, a running sum. Else it collects each part from all senders, ignores senders with stale weights if
    others have newer ones, and all others if `preferred` senders are there; of two, it takes the mean. If the total
    weight is 0, the result is nan, which receivers drop.

    Args:
        max_weight: cap on one sender's weight.
        excluded: indices of senders that receive the result but have no weight.
        preferred: indices of senders.
    """

    def __init__(
        self,
        part_shapes: tuple[torch.Size, ...],
        num_senders: int,
        *,
        combine: Combine | None = None,
        max_weight: float = math.inf,
        excluded: Collection[int] = (),
        preferred: Collection[int] = (),
    ):
        self.combine, self.max_weight, self.excluded, self.preferred = combine, max_weight, excluded, preferred
        self.counted_weights = [0.0] * num_senders  # sum of the weights of each sender's valid parts
        self.average = torch.zeros(0)  # the result for the latest part
        self.received: dict[int, dict[int, tuple[Tensor, float]]] = {}
        """By part, since some senders are ahead of others, and by sender; only with `combine`."""
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
            if self.combine is not None:
                self.received.setdefault(part_index, {})[sender_index] = (tensor_part, weight)
        # Shielded: all senders wait for one future, which would be cancelled with the first of their tasks.
        added = super().accumulate_part(sender_index, part_index, tensor_part, weight)
        self.average = await asyncio.shield(added)
        return self.average

    def check_current_part_finished(self) -> None:
        if self.combine is not None and self.current_part_accumulated_from == self.num_current_senders:
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


def centred_clipping(parts: Tensor, weights: Tensor, radius_share: float = 1.0) -> Tensor:
    """Centred clipping (Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", section 4):
    the mean of the parts, each clipped to a radius around the centre.

    The initial centre is the part closest to the others; the radius is `radius_share` of the median distance from the
    centre.
    """
    centre = parts[pairwise_distances(parts).quantile(0.5, dim=1).argmin()]
    for _ in range(CLIPPING_ROUNDS):
        offsets = parts - centre
        distances = offsets.norm(dim=1)
        # Zeros count: if most peers agree, the one that lies must not set the radius.
        radius = radius_share * distances.median()
        shares = weights * (radius / distances.clamp(min=1e-30)).clamp(max=1.0)
        shares[distances > REJECT_RADII * radius] = 0.0
        centre = centre + (shares / weights.sum()) @ offsets
    return centre


def trimmed_mean(parts: Tensor, _: Tensor) -> Tensor:
    """Coordinate-wise trimmed mean (Yin et al. 2018, definition 2); ignores the senders' weights."""
    trimmed = max(1, int(len(parts) * TRIMMED_SHARE))
    return parts.sort(dim=0).values[trimmed : len(parts) - trimmed].mean(0)


def median(parts: Tensor, _: Tensor) -> Tensor:
    """Coordinate-wise median (Yin et al. 2018, definition 1); ignores the senders' weights."""
    return parts.quantile(0.5, dim=0)


Rule = Callable[..., PartReducer]
"""Creates the reducer of a round."""
RULES: dict[str, Rule] = {
    "centred_clipping": partial(PartReducer, combine=centred_clipping),
    "trimmed_mean": partial(PartReducer, combine=trimmed_mean),
    "median": partial(PartReducer, combine=median),
    "mean": PartReducer,
}
assert set(RULES) == set(AGGREGATIONS)
TIGHTER = partial(PartReducer, combine=partial(centred_clipping, radius_share=0.5))
"""For a run that was rolled back because its loss had risen."""


def rule_of(settings: SwarmSettings) -> Rule:
    """The rule that a run's settings name; tighter after a rollback, which all peers see by the run's name."""
    if settings.wire.aggregation == "centred_clipping" and settings.swarm.rollbacks:
        return TIGHTER
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
