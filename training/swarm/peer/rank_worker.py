"""The other processes of a peer with several GPUs: they compute their shares of the batches of rank 0, the Peer.

Only rank 0 communicates with the swarm and reads data. torch averages the gradients, as in `dalle-lean train`.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from dalle_lean.errors import UserError
from training.run.processes import Processes, open_processes
from training.run.recipe import MemoryRecipe
from training.swarm.config import read_settings
from training.swarm.peer.gradient_worker import Order, StepWorker


@dataclass(frozen=True)
class Work:
    """What rank 0 tells the others before it starts a peer."""

    folder: Path
    """Holds the run's swarm.toml."""
    batch_size: int
    memory: MemoryRecipe


def open_peer(device: str) -> Processes:
    """The processes that share this peer's work; ValueError if they span several machines: each is its own peer."""
    world, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world != here:
        raise UserError(f"{world} processes, {here} of them on this machine: start torchrun separately on each machine")
    return open_processes(device if world == 1 else device.partition(":")[0])


def run_rank(device: str) -> None:
    """Compute batches for rank 0 until it sends None; a sentence means that it rejoins the run."""
    processes, worker = open_peer(device), None
    told: Work | Order | str | None
    with processes.together():
        while (told := processes.from_first(None)) is not None:
            if isinstance(told, Work):
                leave_signals_to_first()
                settings = read_settings(told.folder)
                worker = StepWorker(settings, batch_size=told.batch_size, memory=told.memory, processes=processes)
            elif isinstance(told, Order):
                assert worker is not None
                worker.follow(told)
                if not worker.has_inner_steps:
                    worker.model.zero_grad(set_to_none=True)
            else:
                worker = None  # frees its memory until the next Work
                if processes.device.type == "cuda":
                    torch.cuda.empty_cache()
    processes.close()


def leave_signals_to_first() -> None:
    """Only rank 0 handles Ctrl+C and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
