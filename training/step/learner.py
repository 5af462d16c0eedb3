"""A model with its optimizer, and one training step."""

import math
from typing import Any, NamedTuple

import torch

from dalle_lean import Dalle, MemoryPlan
from dalle_lean.model.dalle import Crop
from dalle_lean.optim.lamb import Lamb, is_sharded
from dalle_lean.optim.muon import MuonAdamW
from dalle_lean.optim.parameter_groups import muon_groups, parameter_groups
from dalle_lean.require import require
from training.data.loader import Batch
from training.run.processes import ALONE, Processes
from training.run.recipe import LAMB_ONLY, OptimizerRecipe, Recipe
from training.step.gradients import GradientComputer


def build_optimizer(model: torch.nn.Module, recipe: OptimizerRecipe, plan: MemoryPlan) -> torch.optim.Optimizer:
    """Build the recipe's optimizer for `model`; each step sets the learning rate.

    "adamw8bit" is bitsandbytes', for small runs: its 8-bit statistics do not keep exact zeros on a CPU, so weights that
    never get a gradient drift a little. MissingPackage without bitsandbytes.
    """
    groups = (muon_groups if recipe.name == "muon" else parameter_groups)(model, recipe.weight_decay)
    settings: dict[str, Any] = {"lr": 0.0, "betas": recipe.betas, "eps": recipe.eps}
    if recipe.name == "lamb":
        settings |= {name: getattr(recipe, name) for name in LAMB_ONLY}
        return Lamb(groups, offload=plan.offload_optimizer, master_weights=plan.master_weights, **settings)
    if recipe.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **settings)
    if recipe.name == "muon":
        return MuonAdamW(groups, **settings)
    return require("bitsandbytes", "training").optim.AdamW8bit(groups, **settings)


class Step(NamedTuple):
    loss: float
    """In nats."""
    grad_norm: float
    """Before clipping."""
    rescaled: bool = False
    """A float16 gradient overflowed: its scale was lowered, and the weights stay."""


class Learner(GradientComputer):
    """Trains `model` in place.

    Args:
        recipe: its batch is this process's share; see `Recipe.share_of`.

    ValueError if the model does not support the recipe's memory plan or precision.
    """

    def __init__(self, model: Dalle, recipe: Recipe, processes: Processes = ALONE):
        super().__init__(model, recipe.memory, recipe.data.batch_size // recipe.memory.micro_batches, processes)
        self.clip_norm = recipe.optimizer.clip_norm
        self.optimizer = build_optimizer(model, recipe.optimizer, recipe.memory)

    def step(self, batch: Batch, lr: float, crop: Crop | None = None) -> Step:
        """Take one optimizer step on the batch, or on a crop of each sample.

        If loss or gradient is not finite, or a gradient was rescaled, the weights stay.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate_gradient(batch, crop)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        if is_sharded(norm):
            norm = norm.full_tensor()
        loss_nats, grad_norm = torch.stack([loss, norm.to(loss.dtype)]).tolist()  # one synchronization
        finite = math.isfinite(loss_nats) and math.isfinite(grad_norm)
        scales = self.model.scales
        if scales is not None and not scales.update(self.processes.any_of_each):
            if scales.exhausted:
                return Step(loss_nats, math.inf)  # counts as skipped: no smaller scale is left
            return Step(loss_nats, grad_norm, rescaled=finite)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return Step(loss_nats, grad_norm)
