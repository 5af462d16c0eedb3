"""A gradient scale for each branch, so that float16 trains deep models.

The smallest float16 number is 6e-8, and gradients differ by many orders of magnitude between the branches of a deep
model: no single loss scale keeps all of them in range. The residual streams carry gradients in float32; each branch
multiplies its incoming gradient by its own scale, and what it passes on, gradients of parameters included, is divided
by it again.
Source: Ramesh et al. 2021, "Zero-Shot Text-to-Image Generation", section 2.4 and appendix D.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.model.compute_weights import ComputeWeights

FIRST = 2.0**13
LARGEST = 2.0**24
GROWTH = 2.0 ** (1 / 1000)


class BranchScales:
    """The scales of `count` branches, two per layer; each doubles over 1000 steps without overflow, growing a little at
    each, and halves at an overflow."""

    def __init__(self, count: int):
        self.count = count
        self.values = [FIRST] * count
        self.exhausted = False
        """Whether a gradient overflowed at the smallest scale at the latest update: it is too large for float16."""
        self._overflow = torch.zeros(count, dtype=torch.bool)

    def apply(self, weights: ComputeWeights, branch: int, device: torch.device) -> ComputeWeights:
        """The weights for the backward of branch number `branch`, whose incoming gradient has this branch's scale."""
        self._overflow = self._overflow.to(device)
        return replace(weights, grad_scale=self.values[branch], overflow=self._overflow[branch])

    def update(self, agreed: Callable[[Tensor], Tensor] = lambda overflow: overflow) -> bool:
        """Adapt the scales after backward. False if a gradient was not finite: then skip the step.

        Args:
            agreed: maps the branches that overflowed here, bool [count], to those that did in any process.
        """
        overflowed = agreed(self._overflow).tolist()
        self._overflow.zero_()
        self.exhausted = any(too_large and value == 1 for value, too_large in zip(self.values, overflowed, strict=True))
        for branch, (value, too_large) in enumerate(zip(self.values, overflowed, strict=True)):
            self.values[branch] = max(value / 2, 1.0) if too_large else min(value * GROWTH, LARGEST)
        return not any(overflowed)

    def state_dict(self) -> dict[str, Any]:
        """The scales, ready for JSON."""
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`; ValueError for another number of branches or a scale out of range."""
        values = [float(value) for value in state["values"]]
        if len(values) != self.count or not all(1 <= value <= LARGEST for value in values):
            raise UserError(f"{len(values)} gradient scales: this model needs {self.count} in 1..{LARGEST:.0f}")
        self.values = values
