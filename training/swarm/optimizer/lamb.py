"""LAMB over the average of all peers' gradients, clipped."""

from typing import Any

from dalle_lean.optim.lamb import Lamb
from dalle_lean.optim.lamb_step import new_statistics
from training.swarm.optimizer.checked_step import CheckedStep


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
