"""Muon for the weight matrices of the blocks, AdamW for everything else.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; for the scale of the updates,
with which one learning rate serves both, Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2.
"""

from collections.abc import Callable
from typing import Any

import torch

MOMENTUM = 0.95


class MuonAdamW(torch.optim.Optimizer):
    """Muon over the first of `muon_groups`, AdamW over the others, with one state dict.

    Args:
        betas, eps: AdamW's; Muon has Nesterov momentum MOMENTUM.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float):
        hidden, *others = groups
        self.muon = torch.optim.Muon([hidden], lr=lr, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, fused=True)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        parts = ((self.muon, self.param_groups[:1]), (self.adamw, self.param_groups[1:]))
        for optimizer, groups in parts:  # load_state_dict replaces both attributes
            optimizer.state, optimizer.param_groups = self.state, groups
            optimizer.step()
