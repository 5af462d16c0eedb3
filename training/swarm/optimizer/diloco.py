"""DiLoCo, the mode for slow links: many inner steps between two steps of the swarm.

Each peer trains alone, starting from the shared weights. The peers average their weight changes as pseudo-gradients,
and an outer optimizer, SGD with Nesterov momentum, takes one step along that average.
Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105,
algorithm 1. Unlike in the paper, samples weight the pseudo-gradients, as peers differ in speed.

The shared weights are hivemind's offloaded copies; the model's own parameters hold the inner steps. Nothing is delayed:
the model gets the shared weights only after a step of the swarm or a download.
"""

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from training.swarm.averaging.gradient_averager import SwarmGradientAverager
from training.swarm.config import SwarmSettings
from training.swarm.optimizer.checked_step import CheckedStep
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer


class PseudoGradientAverager(SwarmGradientAverager):
    """Averages the pseudo-gradients: shared minus own parameters."""

    shared: Sequence[Tensor]
    """In the order of `parameters`; set after construction."""

    def __init__(self, parameters: Iterable[Tensor], *, reuse_grad_buffers: bool = False, **options: Any):
        # Nothing is accumulated, so hivemind needs no buffers.
        super().__init__(parameters, reuse_grad_buffers=True, **options)

    def _grads_from_parameters(self) -> Iterator[Tensor]:
        # Only the shapes matter; hivemind would allocate gradients.
        for parameter in self.parameters:
            yield parameter.detach()

    def _grad_accumulators(self) -> Iterator[Tensor]:
        # None: after each step hivemind would set the parameters themselves to zero.
        return iter(())

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        with self.get_tensors() as targets:
            for target, shared, own in zip(targets, self.shared, self.parameters, strict=True):
                torch.sub(shared, own.detach().to(shared.device, shared.dtype), out=target)


class OuterSGD(CheckedStep, torch.optim.SGD):
    """One step along the averaged pseudo-gradient."""

    def __init__(self, groups: Any, *, lr: float, momentum: float):
        importlib.import_module("torch._dynamo")  # SGD would at its first step, and the peer would miss its round
        # Weight decay belongs to the inner optimizer.
        groups = [{**group, "weight_decay": 0.0} for group in groups]
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
        for group in self.param_groups:
            for parameter in group["params"] if momentum else ():
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class DilocoOptimizer(SwarmOptimizer):
    """A peer's outer optimizer; inner steps are taken elsewhere, and `step` counts their samples."""

    last_step_share = 0.5  # dozens of inner steps and momentum in one

    def _make_gradient_averager(self, factory: Any, **options: Any) -> PseudoGradientAverager:
        averager: PseudoGradientAverager = super()._make_gradient_averager(factory, **options)
        averager.shared = [parameter for group in self.opt.param_groups for parameter in group["params"]]
        return averager

    def inner_step(self, batch_size: int) -> int:
        """The position in the schedule, from 1, of this peer's next inner step of `batch_size` samples.

        All peers together take the schedule's steps between two steps of the swarm, so everybody's samples count.
        """
        progress = self.tracker.global_progress
        others = progress.samples_accumulated if progress.epoch == self.local_epoch else 0
        samples = max(others, self.grad_averager.local_samples_accumulated)
        steps = self.target_batch_size // batch_size
        return self.local_epoch * steps + min(samples // batch_size, steps - 1) + 1


def make_outer(settings: SwarmSettings, groups: Any) -> OuterSGD:
    """The run's outer optimizer over the groups of `parameter_groups`."""
    return OuterSGD(groups, lr=settings.wire.outer_lr, momentum=settings.wire.outer_momentum)
