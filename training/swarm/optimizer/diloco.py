"""Many steps of one's own between two of the swarm: the second mode, for slow links.

Each peer trains the model alone from the weights that all have agreed on. What is averaged is the way that it went, as
if it were a gradient, and an outer optimizer, SGD with Nesterov momentum, takes one step along the mean of these ways.
Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105,
algorithm 1. Here a way weighs as much as the samples it was made of, since peers differ in speed.

The agreed weights are hivemind's offloaded copies; the model's own parameters are a peer's own. Nothing is delayed, so
that the agreed weights reach the model only where a step of the swarm is taken, or a state adopted.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from hivemind.optim.grad_averager import GradientAverager
from torch import Tensor

from training.swarm.averaging.gradient_averager import SwarmGradientAverager
from training.swarm.config import SwarmSettings
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer


class PseudoGradientAverager(SwarmGradientAverager):
    """Averages how far the peers' parameters are from the agreed ones: agreed minus own."""

    agreed: Sequence[Tensor]
    """In the order of `parameters`; set once they are there."""

    def __init__(self, parameters: Iterable[Tensor], *, reuse_grad_buffers: bool = False, **options: Any):
        # No gradients are added up here; so hivemind keeps no room for their sum.
        super().__init__(parameters, reuse_grad_buffers=True, **options)

    def _grads_from_parameters(self) -> Iterator[Tensor]:
        # The shapes of what is averaged; gradients would be made for it.
        for parameter in self.parameters:
            yield parameter.detach()

    def accumulate_grads_(self, batch_size: int) -> None:
        """Count the samples of a step that was taken."""
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += bool(batch_size)

    def reset_accumulated_grads_(self) -> None:
        """Begin a way."""
        self._accumulators_used_in_step = False
        self.local_samples_accumulated = self.local_times_accumulated = 0

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """The way from the agreed parameters to the own ones."""
        with self.get_tensors() as ways:
            for way, agreed, own in zip(ways, self.agreed, self.parameters, strict=True):
                torch.sub(agreed, own.detach().to(agreed.device, agreed.dtype), out=way)


class OuterSGD(torch.optim.SGD):
    """One step along the mean way; one that is not finite is counted and not taken.

    Its momentum is there from the beginning, so that a newcomer knows what a state is made of.
    """

    def __init__(self, groups: Any, *, lr: float, momentum: float):
        # Weight decay is the inner optimizer's.
        groups = [{**group, "weight_decay": 0.0} for group in groups]
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.skipped_steps = 0
        self.grad_norm = math.nan
        self.held = False
        """Nobody has gone any way: the next step changes nothing."""
        self.failure: Exception | None = None
        for group in self.param_groups:
            for parameter in group["params"] if momentum else ():
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step along the ways that are there."""
        if self.held:
            return None
        ways = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        self.grad_norm = float(torch.nn.utils.get_total_norm([way for way in ways if way is not None]))
        if not math.isfinite(self.grad_norm):
            self.skipped_steps += 1
            return None
        try:
            return super().step(closure)
        except Exception as error:
            self.failure = error
            raise


class DilocoOptimizer(SwarmOptimizer):
    """A peer's side of the outer optimizer. The model's own steps are taken elsewhere; `step` counts them."""

    def _make_gradient_averager(
        self, factory: Callable[..., GradientAverager] | None, **options: Any
    ) -> PseudoGradientAverager:
        averager = super()._make_gradient_averager(factory, **options)
        averager.agreed = [parameter for group in self.opt.param_groups for parameter in group["params"]]
        made: PseudoGradientAverager = averager
        return made

    def inner_step(self, batch_size: int) -> int:
        """The number, from 1, that the schedule gives to the next step of one's own; of the recipe's `batch_size`.

        All peers together take the steps between two of the swarm, so their samples count.
        """
        progress = self.tracker.global_progress
        others = progress.samples_accumulated if progress.epoch == self.local_epoch else 0
        samples = max(others, self.grad_averager.local_samples_accumulated)
        steps = self.target_batch_size // batch_size
        return self.local_epoch * steps + min(samples // batch_size, steps - 1) + 1


def make_outer(settings: SwarmSettings, groups: Any) -> OuterSGD:
    """The run's outer optimizer over the groups of `parameter_groups`."""
    return OuterSGD(groups, lr=settings.wire.outer_lr, momentum=settings.wire.outer_momentum)
