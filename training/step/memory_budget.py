"""Checks by arithmetic, before anything is allocated, that a run fits this machine's memory."""

import torch

from dalle_lean import DalleConfig
from dalle_lean.errors import UserError
from dalle_lean.free_memory import free_bytes, free_ram_bytes
from dalle_lean.memory import cost_of
from dalle_lean.memory.plan_search import human_bytes
from training.data.loader import BATCHES_AHEAD
from training.run.recipe import Recipe

ID_BYTES = 8


def memory_shortage(
    config: DalleConfig, recipe: Recipe, device: torch.device, local_world: int = 1
) -> UserError | None:
    """The error, with both figures, if a step needs more memory than is free on the device, or `local_world` processes
    need more than is free in RAM."""
    setup = recipe.training_setup("cuda" if device.type == "cuda" else "cpu")
    cost = cost_of(config, recipe.memory, setup)
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
