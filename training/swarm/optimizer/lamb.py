"""LAMB as the swarm runs it: over the average of all peers' gradients, clipped, and never with numbers that are not
finite."""

import math
from typing import Any

import torch

from dalle_lean.optim.lamb import Lamb
from dalle_lean.optim.lamb_step import new_statistics


class SwarmLamb(Lamb):
    """Clips the norm of all gradients together, as the run on one machine does; a step that is not finite is counted
    and not taken.

    Its statistics are there from the beginning, so that a newcomer knows what a state is made of.
    """

    def __init__(self, *arguments: Any, clip_norm: float, **settings: Any):
        super().__init__(*arguments, **settings)
        self.clip_norm = clip_norm
        self.skipped_steps = 0
        self.grad_norm = float("nan")
        self.held = False
        """Nobody has brought a gradient: the next step changes nothing."""
        self.failure: Exception | None = None
        """What ended a step that hivemind ran in the background, where it is only logged."""
        for group in self.param_groups:
            for parameter in group["params"]:
                in_bytes = group["eight_bit"] and parameter.numel() >= group["min_eight_bit_numel"]
                statistics = new_statistics(parameter.detach(), block_size=group["block_size"] if in_bytes else None)
                self.state[parameter].update(statistics, step=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step with the gradients that are there."""
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
