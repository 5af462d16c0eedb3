"""A model with its optimizer: one step, one measurement."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dalle_lean import Dalle, MemoryPlan
from dalle_lean.lamb_delayed import DelayedLamb
from dalle_lean.model import Crop
from dalle_lean.optim import Lamb, make_optimizer, parameter_groups
from dalle_lean.scaling import BranchScales
from training.data import Batch
from training.precision import autocast
from training.recipe import LAMB_ONLY, OptimizerRecipe, Recipe


def build_optimizer(
    model: torch.nn.Module, recipe: OptimizerRecipe, plan: MemoryPlan
) -> torch.optim.Optimizer | DelayedLamb:
    """The optimizer that the recipe names, over `model`'s parameters; the learning rate is set at each step."""
    settings: dict[str, Any] = {}
    if recipe.name == "lamb":
        settings = {name: getattr(recipe, name) for name in LAMB_ONLY if name != "delayed"}
        settings |= {"offload": plan.offload_optimizer, "master_weights": plan.master_weights}
    beta_mean, beta_square = recipe.betas
    groups = parameter_groups(model, recipe.weight_decay)
    optimizer = make_optimizer(recipe.name, groups, betas=(beta_mean, beta_square), eps=recipe.eps, **settings)
    if not recipe.delayed:
        return optimizer
    assert isinstance(optimizer, Lamb)
    return DelayedLamb(optimizer)


class Step(NamedTuple):
    """How a step went."""

    loss: float
    """In nats."""
    grad_norm: float
    """Before clipping."""
    rescaled: bool = False
    """float16 overflowed in a gradient; its scale is smaller now, and nothing was learnt."""


class Learner:
    """Turns batches into better weights of `model`, which it changes in place.

    ValueError where the model cannot have the recipe's memory plan or precision.
    """

    def __init__(self, model: Dalle, recipe: Recipe):
        self.memory = recipe.memory
        self.model = model.train()
        self.model.plan = recipe.memory
        if self.memory.precision == "bf16-weights":
            self.model.to(torch.bfloat16)
        if self.memory.precision == "fp16":
            self.model.scales = BranchScales(2 * model.config.num_layers)
        self.micro_batch_size = recipe.data.batch_size // recipe.memory.micro_batches
        self.clip_norm = recipe.optimizer.clip_norm
        self.optimizer = build_optimizer(model, recipe.optimizer, recipe.memory)
        self.losses: Any = torch.compile(model.losses) if recipe.memory.compile else model.losses

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def step(self, batch: Batch, lr: float, crop: Crop | None = None) -> Step:
        """One optimizer step on the whole batch, or on a crop of each of its samples.

        Where loss or gradient is not finite, or a gradient was rescaled, nothing is changed.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate_gradient(batch, crop)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        loss_nats, grad_norm = torch.stack([loss, norm.to(loss.dtype)]).tolist()  # one wait for the device
        finite = math.isfinite(loss_nats) and math.isfinite(grad_norm)
        if self.model.scales is not None:
            before = list(self.model.scales.values)
            if not self.model.scales.update():
                # A scale that stays at its smallest helps no more: the gradient itself is too large for float16.
                if any(old == new == 1 for old, new in zip(before, self.model.scales.values, strict=True)):
                    return Step(loss_nats, math.inf)
                return Step(loss_nats, grad_norm, rescaled=finite)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return Step(loss_nats, grad_norm)

    def accumulate_gradient(self, batch: Batch, crop: Crop | None = None) -> Tensor:
        """Add the gradient of the batch's mean loss, one micro-batch at a time; returns that loss in nats."""
        total = torch.zeros((), device=self.device)
        for part in self.micro_batches(batch):
            with self.autocast():
                text_nats, image_nats = self.losses(*part, crop)
                loss = self.weigh(text_nats, image_nats) * (len(part.text_ids) / len(batch.text_ids))
            loss.backward()
            total += loss.detach()
        return total

    def finish(self) -> None:
        """Let a delayed step move the weights; before they are looked at or saved for use."""
        if isinstance(self.optimizer, DelayedLamb):
            self.optimizer.finish()

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, float]:
        """Losses of samples that are not trained on: the training loss, its two parts, and bits per image code."""
        self.finish()
        self.model.eval()
        sums = torch.zeros(2, device=self.device)
        for part in self.micro_batches(batch):
            with self.autocast():
                sums += torch.stack(self.model.losses(*part)).float() * len(part.text_ids)
        self.model.train()
        text_nats, image_nats = (sums / len(batch.text_ids)).tolist()
        return {
            "heldout_loss": self.weigh(text_nats, image_nats),
            "heldout_text_nats": text_nats,
            "heldout_image_nats": image_nats,
            "heldout_image_bits": image_nats / math.log(2),
        }

    def weigh(self, text_nats: Any, image_nats: Any) -> Any:
        """The training loss from its parts."""
        weight = self.model.config.image_loss_weight
        return (text_nats + weight * image_nats) / (1 + weight)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """The batch in parts of the size that is trained on at once, on the model's device."""
        size = self.micro_batch_size
        parts = zip(batch.text_ids.split(size), batch.image_codes.split(size), strict=True)
        # Pinned batches are copied while the host goes on; others are waited for as ever.
        return [Batch(*(part.to(self.device, non_blocking=True) for part in pair)) for pair in parts]

    def autocast(self) -> torch.autocast:
        """The recipe's precision."""
        return autocast(self.device.type, self.memory.precision)
