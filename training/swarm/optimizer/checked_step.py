"""Optimizer steps for hivemind's background thread: they skip gradients that are not finite and lose no error."""

import math
from typing import Any

import torch

from dalle_lean.optim.lamb import Lamb
from dalle_lean.optim.lamb_step import new_statistics


class CheckedStep(torch.optim.Optimizer):
    """Mixin of optimizers that counts and skips steps whose gradients are not finite.

    The optimizer must allocate its statistics when it is created, so that a newcomer knows a state's tensors.
    """

    clip_norm = math.inf
    """Largest norm of all gradients together."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.skipped_steps = 0
        self.held = False
        """Whether the next step changes nothing, because nobody contributed a gradient."""
        self.failure: Exception | None = None
        """The exception that ended a background step, which hivemind only logs."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.held:
            return None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        try:
            if not math.isfinite(torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)):
                self.skipped_steps += 1
                return None
            return super().step(closure)
        except Exception as error:
            self.failure = error
            raise


class SwarmLamb(CheckedStep, Lamb):
    """Clips the norm of all gradients together, as a run on one machine does."""

    def __init__(self, *arguments: Any, clip_norm: float, **settings: Any):
        super().__init__(*arguments, **settings)
        self.clip_norm = clip_norm
        for group in self.param_groups:
            for parameter in group["params"]:
                in_bytes = group["eight_bit"] and parameter.numel() >= group["min_eight_bit_numel"]
                statistics = new_statistics(parameter.detach(), block_size=group["block_size"] if in_bytes else None)
                self.state[parameter].update(statistics, step=0)
