"""Averaging of gradients over all samples of all peers."""

import math
from collections.abc import Callable, Collection, Mapping
from statistics import median_low
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.p2p import PeerID

from training.swarm.averaging.averagers import FilteredAverager


class SwarmGradientAverager(FilteredAverager, GradientAverager):
    """Takes the mean over samples, whatever the sizes of the batches; a batch of 0 samples adds nothing.

    Each peer reports its step to its group, see `epoch_of_group`.
    """

    current_epoch: Callable[[], int | None]
    """Set after construction; returns None for peers whose step does not count."""

    def schedule_step(self, **options: Any) -> StepControl:
        return super().schedule_step(gather=self.current_epoch(), **options)

    def accumulate_grads_(self, batch_size: int) -> None:
        if batch_size:
            super().accumulate_grads_(batch_size)

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        # hivemind divides by the number of batches, which gives the mean only if all are as large as the first.
        samples, unit = self.local_samples_accumulated, self._anchor_batch_size
        with self.get_tensors() as averaged:
            for accumulated, target in zip(self._grad_accumulators(), averaged, strict=True):
                target.copy_(accumulated).mul_(unit / samples if samples else 0.0)


class SwarmPowerSGDAverager(SwarmGradientAverager, PowerSGDGradientAverager):
    """PowerSGD: sends gradients as products of low-rank matrices (Vogels et al. 2019, arXiv 1905.13727)."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        # All peers start from the same matrices, as in algorithm 1 of the paper; in hivemind each draws its own.
        generator = torch.Generator().manual_seed(0)
        for matrix in self._qs:
            matrix.copy_(torch.rand(matrix.shape, generator=generator))

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **options: Any) -> Any:
        # A peer without samples has no compression error; hivemind would take the others' whole gradients for it.
        no_samples = options.get("weight") == 0
        errors = [matrix.clone() for matrix in self._ms] if no_samples else self._ms
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **options)
        if no_samples:
            for matrix, before in zip(self._ms, errors, strict=True):
                matrix.copy_(before)
        return gathered


def epoch_of_group(reported: Mapping[PeerID, Any], own: int, donors: Collection[PeerID] = ()) -> int:
    """The latest step that members of a group report, ignoring reports more than one step ahead of the median.

    If `donors` are in the group, only their reports count.
    """
    epochs = {peer: epoch for peer, epoch in reported.items() if type(epoch) is int and epoch >= 0}
    named = [epoch for peer, epoch in epochs.items() if peer in donors]
    if named:
        return max(own, *named)
    median = median_low([*epochs.values()] or [own])  # the lower of two, since either may be wrong
    return max([own, *(epoch for epoch in epochs.values() if epoch <= median + 1)])


def epoch_of_trainers(reported: Mapping[PeerID, Any], own: int) -> int:
    """The step that a donor moves to: the lower median of its group's trainers.

    A single trainer, which could claim any step, moves it by one step at most.
    """
    epochs = [epoch for epoch in reported.values() if type(epoch) is int and epoch >= 0]
    most = math.inf if len(epochs) > 1 else own + 1
    return int(max(own, min(median_low(epochs or [own]), most)))
