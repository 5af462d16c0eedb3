"""Computes a model's gradients on batches, and measures its losses."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dalle_lean import Dalle
from dalle_lean.model.dalle import Crop
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.precision import autocast
from training.data.loader import Batch
from training.run.processes import ALONE, Processes
from training.run.recipe import MemoryRecipe
from training.step.data_parallel import Losses, gradient_sync, is_fsdp, replicated_plan, runnable_plan


class GradientComputer:
    """Computes gradients and losses of `model` under the plan `memory`, at most `micro_batch_size` samples at once.

    Several `processes` compute the gradient of the mean loss of their batches, which have equal sizes. A model that is
    not sharded is replicated.

    ValueError if the model does not support the memory plan or the precision.
    """

    def __init__(self, model: Dalle, memory: MemoryRecipe, micro_batch_size: int, processes: Processes = ALONE):
        replicate = processes.world > 1 and not is_fsdp(model)
        if replicate:
            memory = replicated_plan(memory)
        self.model = model.train()
        memory = runnable_plan(memory, self.device)
        self.memory, self.micro_batch_size, self.processes = memory, micro_batch_size, processes
        self.model.plan = memory
        if memory.precision == "bf16-weights":
            self.model.to(torch.bfloat16)
        if memory.precision == "fp16":
            self.model.scales = BranchScales(2 * model.config.num_layers)
        self.losses: Any = torch.compile(model.losses) if memory.compile else model.losses
        if replicate:
            self.losses = DistributedDataParallel(Losses(model, self.losses), gradient_as_bucket_view=True)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def accumulate_gradient(self, batch: Batch, crop: Crop | None = None) -> Tensor:
        """Accumulate the gradient of the batch's mean loss over its micro-batches; returns that loss in nats.

        Several processes must start without earlier gradients: they communicate only after the last micro-batch.
        """
        total = torch.zeros((), device=self.device)
        parts = self.micro_batches(batch)
        for number, part in enumerate(parts, start=1):
            with gradient_sync(self.model, self.losses, wanted=number == len(parts)):
                with self.autocast():
                    text_nats, image_nats = self.losses(*part, crop)
                    loss = self.model.weigh(text_nats, image_nats) * (len(part.text_ids) / len(batch.text_ids))
                loss.backward()
            total += loss.detach()
        return self.processes.mean(total)

    @torch.no_grad()
    def measure(self, batch: Batch) -> dict[str, float]:
        """Measure held-out samples: the training loss and its two parts (nats), and bits per image code."""
        self.model.eval()
        sums = torch.zeros(2, device=self.device)
        for part in self.micro_batches(batch):
            with self.autocast():
                sums += torch.stack(self.model.losses(*part)).float() * len(part.text_ids)
        self.model.train()
        if is_fsdp(self.model):
            self.model.reshard()  # a backward pass would do it
        text_nats, image_nats = (sums / len(batch.text_ids)).tolist()
        return {
            "heldout_loss": self.model.weigh(text_nats, image_nats),
            "heldout_text_nats": text_nats,
            "heldout_image_nats": image_nats,
            "heldout_image_bits": image_nats / math.log(2),
        }

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Split the batch into micro-batches on the model's device."""
        size = self.micro_batch_size
        parts = zip(batch.text_ids.split(size), batch.image_codes.split(size), strict=True)
        if self.device.type != "cpu":  # the model checks ids on the CPU only
            self.model.check_inputs(*batch)
        return [Batch(*(part.to(self.device, non_blocking=True) for part in pair)) for pair in parts]

    def autocast(self) -> torch.autocast:
        return autocast(self.device.type, self.memory.precision)
