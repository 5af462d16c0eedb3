"""A model with its optimizer: one step, one measurement."""

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dalle_lean import Dalle
from dalle_lean.optim import Lamb, parameter_groups
from training.data import Batch
from training.precision import autocast
from training.recipe import OptimizerRecipe, Recipe


def build_optimizer(model: torch.nn.Module, recipe: OptimizerRecipe) -> torch.optim.Optimizer:
    """The optimizer that the recipe names, over `model`'s parameters; the learning rate is set at each step."""
    groups = parameter_groups(model, recipe.weight_decay)
    beta_mean, beta_square = recipe.betas
    if recipe.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=(beta_mean, beta_square), eps=recipe.eps, fused=True)
    return Lamb(
        groups,
        lr=0.0,
        betas=(beta_mean, beta_square),
        eps=recipe.eps,
        clamp_weight_norm=recipe.clamp_weight_norm,
        bias_correction=recipe.bias_correction,
        eight_bit=recipe.eight_bit,
        block_size=recipe.block_size,
        min_eight_bit_numel=recipe.min_eight_bit_numel,
    )


class Learner:
    """Turns batches into better weights of `model`, which it changes in place."""

    def __init__(self, model: Dalle, recipe: Recipe):
        self.model = model.train()
        self.model.plan = recipe.memory.plan()
        self.memory = recipe.memory
        self.micro_batch_size = recipe.data.batch_size // recipe.memory.micro_batches
        self.clip_norm = recipe.optimizer.clip_norm
        self.optimizer = build_optimizer(model, recipe.optimizer)
        self.losses: Any = torch.compile(model.losses) if recipe.memory.compile else model.losses

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def step(self, batch: Batch, lr: float) -> tuple[float, float]:
        """One optimizer step on the whole batch -> (loss, norm of the gradient before clipping).

        Where either is not finite, nothing is changed.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.accumulate_gradient(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        loss_nats, grad_norm = torch.stack([loss, norm.to(loss.dtype)]).tolist()  # one wait for the device
        if math.isfinite(loss_nats) and math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        return loss_nats, grad_norm

    def accumulate_gradient(self, batch: Batch) -> Tensor:
        """Add the gradient of the batch's mean loss, one micro-batch at a time; returns that loss in nats."""
        total = torch.zeros((), device=self.device)
        for part in self.micro_batches(batch):
            with self.autocast():
                text_nats, image_nats = self.losses(*part)
                loss = self.weigh(text_nats, image_nats) * (len(part.text_ids) / len(batch.text_ids))
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, float]:
        """Losses of samples that are not trained on: the training loss, its two parts, and bits per image code."""
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
        return [Batch(text_ids.to(self.device), image_codes.to(self.device)) for text_ids, image_codes in parts]

    def autocast(self) -> AbstractContextManager[object]:
        """bfloat16 where the recipe wants it."""
        return autocast(self.device.type, self.memory.precision, self.model.config.sequence_len)
