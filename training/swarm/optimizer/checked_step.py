"""Optimizer steps for hivemind's background thread: they skip gradients that are not finite and lose no error."""

import math
from typing import Any

import torch


class CheckedStep(torch.optim.Optimizer):
    """Mixin of optimizers that counts and skips steps whose gradients are not finite.

    The optimizer must allocate its statistics when it is created, so that a newcomer knows a state's tensors.
    """

    clip_norm = math.inf
    """Largest norm of all gradients together."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.skipped_steps = 0
        self.grad_norm = math.nan
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
            self.grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm))
            if not math.isfinite(self.grad_norm):
                self.skipped_steps += 1
                return None
            return super().step(closure)
        except Exception as error:
            self.failure = error
            raise
