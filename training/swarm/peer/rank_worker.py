"""The other processes of a peer with several GPUs: they compute their shares of the batches of the first, the Peer.

Only the first talks to the swarm and reads data. torch averages the gradients, as in `dalle-lean train`.
"""

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from dalle_lean.errors import UserError
from training.data.loader import Batch
from training.run.processes import Processes, open_processes
from training.run.recipe import MemoryRecipe
from training.swarm.config import read_settings
from training.swarm.peer.gradient_worker import StepWorker


@dataclass(frozen=True)
class Work:
    """What a Peer's processes work on."""

    folder: Path
    """With the run's swarm.toml."""
    batch_size: int
    memory: MemoryRecipe


@dataclass(frozen=True)
class Order:
    """What the first process tells the others before each batch."""

    step: int
    """Of the schedule."""
    new_weights: bool
    """Whether the swarm has changed them."""


def open_peer(device: str) -> Processes:
    """The processes that share this peer's work; ValueError if they are on several machines: each is its own peer."""
    world, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world != here:
        raise UserError(f"{world} processes, {here} of them on this machine: start torchrun for each machine alone")
    return open_processes(device if world == 1 else device.partition(":")[0])


def follow(device: str) -> None:
    """Work until the first process has no more work."""
    processes = open_peer(device)
    work: Work | None
    while (work := processes.from_first(None)) is not None:
        settings = read_settings(work.folder)
        obey(StepWorker(settings, batch_size=work.batch_size, memory=work.memory, processes=processes))
    processes.close()


def obey(worker: StepWorker) -> None:
    """Follow the Peer's orders until there are no more; it alone handles Ctrl+C and SIGTERM."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    processes = worker.processes
    order: Order | None
    while (order := processes.from_first(None)) is not None:
        if order.new_weights:
            processes.copy_from_first(worker.model.parameters())
        worker.learn_from(Batch(*processes.share(None)), order.step)
        if not worker.has_inner_steps:
            worker.model.zero_grad(set_to_none=True)
