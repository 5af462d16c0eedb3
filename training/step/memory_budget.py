"""Whether a run fits this machine, by arithmetic, before anything of it is made."""

import torch

from dalle_lean import DalleConfig
from dalle_lean.errors import UserError
from dalle_lean.free_memory import free_bytes, free_ram_bytes
from dalle_lean.memory import cost_of
from dalle_lean.memory.plan_search import human_bytes
from training.data.loader import BATCHES_AHEAD
from training.run.recipe import Recipe

ID_BYTES = 8


def refuse_lack_of_memory(config: DalleConfig, recipe: Recipe, device: torch.device, processes_here: int = 1) -> None:
    """ValueError, with both figures, where a step of each of the processes on this machine needs more memory than is
    free on its device or in the RAM."""
    setup = recipe.training_setup("cuda" if device.type == "cuda" else "cpu")
    cost = cost_of(config, recipe.memory, setup)
    # One that is computed, one on its way to it, and those made ahead.
    batches = (BATCHES_AHEAD + 2) * recipe.data.batch_size * (config.text_len + config.image_len) * ID_BYTES
    ram = batches + (cost.host.total if device.type == "cuda" else cost.peak_bytes)
    needs = [("RAM", processes_here * ram, free_ram_bytes())]
    if device.type == "cuda":
        needs.append((f"memory on {device}", cost.peak_bytes, free_bytes(device)))
    for what, need, free in needs:
        if need > free:
            raise UserError(
                f"a step of {recipe.data.batch_size:,} samples, {setup.batch:,} of them at once, of a model of "
                f"{cost.parameters:,} parameters needs {human_bytes(need)} of {what}, and {human_bytes(free)} are "
                "free: take a smaller batch_size or model, or more micro_batches"
            )


def most_words(recipe: Recipe) -> int:
    """Ids of the tokenizer that is made from the captions; they may turn out fewer."""
    words: int = recipe.model.get("text_vocab_size", recipe.data.text_vocab_size)
    return words
