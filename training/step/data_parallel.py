"""One model on several processes: replicated (DDP) or sharded (FSDP2). torch averages the gradients."""

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from dalle_lean import Dalle, DalleConfig
from dalle_lean.errors import UserError
from training.run.processes import Processes
from training.run.recipe import MemoryRecipe, Recipe
from training.run.spread import whole
from training.step.memory_budget import refuse_lack_of_memory

PARALLEL = ("ddp", "fsdp")


class Losses(nn.Module):
    """`model.losses` as a forward pass, which is where DDP looks."""

    def __init__(self, model: nn.Module, losses: Callable[..., tuple[Tensor, Tensor]]):
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        return self.losses(*inputs)


def replicated(model: nn.Module, losses: Callable[..., tuple[Tensor, Tensor]]) -> DistributedDataParallel:
    """The losses of a model that every process holds whole, under a `replicated_plan`."""
    return DistributedDataParallel(Losses(model, losses), gradient_as_bucket_view=True)


def sharded(model: Dalle | None, processes: Processes) -> Dalle:
    """The first process's model with each tensor spread over all processes, filled where it lives.

    Whole weights and gradients exist only between forward and the end of backward: layers that share weights need all
    of them nearly all the time.
    """
    config = processes.from_first(None if model is None else model.config)
    assert config is not None
    spread = Dalle(config, device="meta")
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    fully_shard(spread, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(spread, "losses")
    # The two losses are views of one tensor, and nothing writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    spread.to_empty(device=processes.device)
    weights = {} if model is None else model.state_dict()
    set_model_state_dict(
        spread, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
    )
    return spread


def gradients_averaged(model: nn.Module, losses: Any, wanted: bool) -> AbstractContextManager[None]:
    """A forward and backward pass after which gradients are averaged over the processes, or (not wanted) kept for a
    later pass, without communication."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
        model.set_reshard_after_backward(wanted)
    elif isinstance(losses, DistributedDataParallel) and not wanted:
        context: AbstractContextManager[None] = losses.no_sync()
        return context
    return nullcontext()


def in_shards(parallel: str | None, config: DalleConfig, recipe: Recipe, processes: Processes) -> bool:
    """Whether each process holds a shard of every tensor ("fsdp") and not the whole model ("ddp").

    Args:
        parallel: what is asked for; None takes shards where the whole model needs more memory than is free.
        recipe: of one process's share of the batches. A process alone has the whole model in any case.

    Raises:
        UserError: too little memory for the whole model, or settings that a model in shards cannot have.
    """
    if parallel not in (None, *PARALLEL):
        raise UserError(f"parallel={parallel!r}: must be one of {', '.join(PARALLEL)}")
    reason = "or take --parallel ddp"
    if parallel != "fsdp" or processes.world == 1:
        lack = lack_of_memory(config, recipe, processes)
        if processes.world == 1 or parallel == "ddp":
            if lack is not None:
                raise lack
            return False
        if not processes.any(lack is not None):
            return False
        reason = f"and whole: {lack or 'it does not fit into the memory of another process'}"
    if needed := missing_for_shards(recipe):
        raise UserError(f"--parallel fsdp does not go with this recipe, it needs {', '.join(needed)}; {reason}")
    return True


def lack_of_memory(config: DalleConfig, recipe: Recipe, processes: Processes) -> UserError | None:
    """What keeps this process from holding the whole model."""
    memory = recipe.memory if processes.world == 1 else replicated_plan(recipe.memory)
    try:
        refuse_lack_of_memory(config, dataclasses.replace(recipe, memory=memory), processes.device, processes.here)
    except UserError as lack:
        return lack
    return None


def replicated_plan(memory: MemoryRecipe) -> MemoryRecipe:
    """The same for a model that every process holds: DDP sees what autograd gets, not what backward adds to .grad."""
    return dataclasses.replace(memory, grads_in_place=False)


def missing_for_shards(recipe: Recipe) -> list[str]:
    """The settings that a model in shards needs and this recipe has not."""
    memory, optimizer, needed = recipe.memory, recipe.optimizer, []
    if optimizer.name == "lamb":
        if optimizer.eight_bit:
            needed.append("[optimizer] eight_bit = false")
        if memory.offload_optimizer:
            needed.append("[memory] offload_optimizer = false")
    if optimizer.delayed:
        needed.append("[optimizer] delayed = false")
    if optimizer.name in ("adamw8bit", "muon"):
        needed.append('[optimizer] name = "adamw" or "lamb"')
    if memory.precision == "bf16-weights":
        needed.append('[memory] precision = "bf16"')
    if memory.compile:
        needed.append("[memory] compile = false")
    return needed


def whole_model(model: Dalle, processes: Processes) -> Dalle:
    """The model, or a copy of the spread one on the first process's CPU; all processes call it."""
    if not isinstance(model, FSDPModule):
        return model
    weights = whole(model.state_dict(), keep=processes.first)
    copy = Dalle(model.config, device="meta")
    if processes.first:
        copy.load_state_dict(weights, assign=True)
    return copy
