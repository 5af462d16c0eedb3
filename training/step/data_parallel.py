"""One model on several processes: replicated (DDP) or, if memory is short, sharded (FSDP2); torch averages."""

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dalle_lean import Dalle, DalleConfig
from dalle_lean.devices import fused_attention_runs
from dalle_lean.errors import UserError
from dalle_lean.free_memory import free_bytes, free_ram_bytes
from dalle_lean.memory import cost_of
from dalle_lean.precision import effective_precision
from dalle_lean.words import human_bytes
from training.data.loader import BATCHES_AHEAD
from training.run.checkpoint import full_tensors
from training.run.processes import Processes
from training.run.recipe import MemoryRecipe, Recipe

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from typing_extensions import TypeIs

PARALLEL = ("ddp", "fsdp")
ID_BYTES = 8


class Losses(nn.Module):
    """`model.losses` as a forward pass, the only method that DDP wraps."""

    def __init__(self, model: nn.Module, losses: Callable[..., tuple[Tensor, Tensor]]):
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        return self.losses(*inputs)


def sharded(model: Dalle | None, processes: Processes) -> Dalle:
    """Shard each tensor of the first process's model over all processes; every process fills its own part.

    Whole weights and gradients exist from the forward pass to the end of the backward pass: layers that share weights
    need all of them nearly all the time.
    """
    from torch.distributed import init_device_mesh
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    config = processes.from_first(None if model is None else model.config)
    assert config is not None
    shards = Dalle(config, device="meta")
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    fully_shard(shards, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(shards, "losses")
    # The two losses are views of one tensor, and nothing writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    shards.to_empty(device=processes.device)
    weights = {} if model is None else model.state_dict()
    set_model_state_dict(
        shards, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    )
    return shards


def is_fsdp(model: object) -> "TypeIs[FSDPModule]":
    """Whether the model is `sharded`."""
    return hasattr(model, "unshard")  # isinstance would need torch.distributed.fsdp, a second of imports


def gradient_sync(model: nn.Module, losses: Any, wanted: bool) -> AbstractContextManager[None]:
    """The context of a forward and backward pass that averages gradients over the processes or, if not `wanted`, only
    accumulates them, without communication."""
    if is_fsdp(model):
        model.set_requires_gradient_sync(wanted)
        model.set_reshard_after_backward(wanted)
    elif isinstance(losses, DistributedDataParallel) and not wanted:
        context: AbstractContextManager[None] = losses.no_sync()
        return context
    return nullcontext()


def use_fsdp(parallel: str | None, config: DalleConfig, recipe: Recipe, processes: Processes) -> bool:
    """Whether each process holds a shard of every tensor ("fsdp") instead of the whole model ("ddp").

    Args:
        parallel: the user's choice; None shards if the whole model needs more memory than is free. A process alone
            holds the whole model in any case.
        recipe: of one process's share of the batches.

    Raises:
        UserError: the whole model does not fit into memory, or the recipe has settings that FSDP does not support.
    """
    if parallel not in (None, *PARALLEL):
        raise UserError(f"parallel={parallel!r}: must be one of {', '.join(PARALLEL)}")
    reason = "or take --parallel ddp"
    if parallel != "fsdp" or processes.world == 1:
        memory = recipe.memory if processes.world == 1 else replicated_plan(recipe.memory)
        replica = dataclasses.replace(recipe, memory=memory)
        shortage = memory_shortage(config, replica, processes.device, processes.local_world)
        if processes.world == 1 or parallel == "ddp":
            if shortage is not None:
                raise shortage
            return False
        if not processes.any(shortage is not None):
            return False
        reason = f"without it: {shortage or 'the model does not fit into the memory of another process'}"
    if needed := missing_for_fsdp(recipe):
        raise UserError(f"--parallel fsdp needs {', '.join(needed)} in the recipe; {reason}")
    return True


def memory_shortage(config: DalleConfig, recipe: Recipe, device: torch.device, local_world: int) -> UserError | None:
    """The error, with both figures, if a step needs more memory than is free on the device, or `local_world` processes
    need more than is free in RAM."""
    memory = runnable_plan(recipe.memory, device)
    recipe = dataclasses.replace(recipe, memory=memory)
    setup = recipe.training_setup("cuda" if device.type == "cuda" else "cpu")
    cost = cost_of(config, memory, setup)
    # One in use, one in transfer, and the prefetched ones.
    batches = (BATCHES_AHEAD + 2) * recipe.data.batch_size * (config.text_len + config.image_len) * ID_BYTES
    ram = batches + (cost.host.total if device.type == "cuda" else cost.peak_bytes)
    needs = [("RAM", local_world * ram, free_ram_bytes())]
    if device.type == "cuda":
        needs.append((f"memory on {device}", cost.peak_bytes, free_bytes(device)))
    for what, need, free in needs:
        if need > free:
            return UserError(
                f"a step of {recipe.data.batch_size:,} samples, {setup.batch:,} of them at once, of a model of "
                f"{cost.parameters:,} parameters needs {human_bytes(need)} of {what}, and {human_bytes(free)} are "
                "free: take a smaller batch_size or model, or more micro_batches"
            )
    return None


def runnable_plan(memory: MemoryRecipe, device: torch.device) -> MemoryRecipe:
    """The plan without what this device cannot do: bfloat16 or fused attention."""
    precision = effective_precision(device.type, memory.precision)
    fused = memory.fused_attention and fused_attention_runs(device)
    return dataclasses.replace(memory, precision=precision, fused_attention=fused)


def replicated_plan(memory: MemoryRecipe) -> MemoryRecipe:
    """The plan for a model under DDP, which misses gradients that backward itself adds to .grad."""
    return dataclasses.replace(memory, grads_in_place=False)


def missing_for_fsdp(recipe: Recipe) -> list[str]:
    """The settings that FSDP needs and this recipe lacks."""
    memory, optimizer, needed = recipe.memory, recipe.optimizer, []
    if optimizer.name == "lamb":
        if optimizer.eight_bit:
            needed.append("[optimizer] eight_bit = false")
        if memory.offload_optimizer:
            needed.append("[memory] offload_optimizer = false")
    if optimizer.name in ("adamw8bit", "muon"):
        needed.append('[optimizer] name = "adamw" or "lamb"')
    if memory.precision == "bf16-weights":
        needed.append('[memory] precision = "bf16"')
    if memory.compile:
        needed.append("[memory] compile = false")
    return needed


def whole_model(model: Dalle, processes: Processes) -> Dalle:
    """The model, or a copy of the sharded one on the first process's CPU; all processes call it."""
    if not is_fsdp(model):
        return model
    weights = full_tensors(model.state_dict(), keep=processes.first)
    copy = Dalle(model.config, device="meta")
    if processes.first:
        copy.load_state_dict(weights, assign=True)
    return copy
