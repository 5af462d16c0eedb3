"""Optimizer steps that hivemind may run in the background: none with gradients that are not finite, no lost error."""

import math
from typing import Any

import torch


class CheckedStep(torch.optim.Optimizer):
    """Counts and skips steps whose gradients are not finite; mixed into an optimizer.

    The optimizer allocates its statistics when it is made, so that a newcomer knows what a state consists of.
    """

    clip_norm = math.inf
    """Of all gradients together."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.skipped_steps = 0
        self.grad_norm = math.nan
        self.held = False
        """Nobody contributed a gradient: the next step changes nothing."""
        self.failure: Exception | None = None
        """What ended a background step; hivemind only logs it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.held:
            return None
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        try:
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm))
            if not math.isfinite(self.grad_norm):
                self.skipped_steps += 1
                return None
            return super().step(closure)
        except Exception as error:
            self.failure = error
            raise
