"""The local batch and the memory plan that fit this machine.

Only what trades memory for time is chosen here: no other peer sees a difference but in speed.
"""

import dataclasses
import math
import shutil
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dalle_lean import Dalle, DalleConfig
from dalle_lean.free_memory import free_bytes, free_ram_bytes
from dalle_lean.memory import TrainingSetup, cost_of, fastest_plan
from dalle_lean.memory.plan_search import human_bytes
from training.data.loader import Batch
from training.run.recipe import MemoryRecipe
from training.step.gradients import GradientComputer
from training.swarm.config import SwarmSettings

REPORT_S = 3.0
"""Compute between two reports to the others: between 1 and 10 s, so that they know how far the step is and nobody has
to wait for a report."""
SLOWEST_REPORT_S = 10.0
FASTER = 0.9
"""More samples at once are taken while each of them takes at most so much of the time."""
REPORTS_PER_STEP = 8
"""One peer alone makes at least so many reports in a step of the swarm, or the step would grow far above its batch."""
FREE_SHARE = 0.9
"""Of the memory that is free; the rest is for fragments and kernels."""
PROCESS_BYTES = 1_200_000_000
"""Python, torch and hivemind's processes before the first tensor."""
HOST_COPIES = 5
"""float32 copies of all parameters in hivemind's hands: the optimizer's weights, averaged gradients, two of what is on
the wire, and a state that is handed out or comes in."""
SHARED_COPIES = 2
"""Of these in shared memory: the first two."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the device, in RAM, and how much of the RAM is shared between processes; a CPU's device is its RAM."""

    device_bytes: int
    ram_bytes: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How this machine takes part.

    Args:
        batch_size: samples between two reports to the others; in "diloco" mode, of a step of one's own.
        memory: the recipe's [memory], or the fastest plan that fits; `micro_batches` parts make up a batch.
        samples_at_once: in one of these parts.
        need: bytes that this takes.
        seconds: that one part takes; nan before it is measured.
    """

    batch_size: int
    memory: MemoryRecipe
    samples_at_once: int
    need: Memory
    seconds: float = math.nan

    @property
    def report_s(self) -> float:
        """Seconds of compute between two reports."""
        return self.seconds * self.memory.micro_batches


def memory_there(device: torch.device) -> Memory:
    """What is free on this machine."""
    ram = free_ram_bytes()
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else ram
    return Memory(device_bytes=free_bytes(device) if device.type == "cuda" else ram, ram_bytes=ram, shared_bytes=shared)


def state_bytes(settings: SwarmSettings) -> int:
    """Of weights and optimizer statistics, as they are downloaded."""
    config = DalleConfig.from_dict(settings.recipe.model)
    cost = cost_of(config, MemoryRecipe(offload_optimizer=True), setup_of(settings, "fp32", 1, "cuda"))
    return 4 * cost.parameters + cost.host.optimizer_state


def setup_of(settings: SwarmSettings, precision: str, samples: int, device: str) -> TrainingSetup:
    """What the cost arithmetic asks for."""
    optimizer = "lamb8bit" if settings.recipe.optimizer.eight_bit else "lamb"
    return TrainingSetup.of_precision(precision, batch=samples, optimizer=optimizer, device=device)


def need_of(settings: SwarmSettings, memory: MemoryRecipe, samples: int, device: str) -> Memory:
    """What `samples` at once take, with all that hivemind holds; device is "cuda" or "cpu"."""
    config = DalleConfig.from_dict(settings.recipe.model)
    plan = dataclasses.replace(memory, offload_optimizer=True)
    # As on CUDA: what the optimizer has is on the host in any case.
    cost = cost_of(config, plan, setup_of(settings, memory.precision, samples, "cuda"))
    parameters = 4 * cost.parameters
    on_device = cost.peak_bytes + parameters  # hivemind adds the gradients of several batches up there
    ram = PROCESS_BYTES + HOST_COPIES * parameters + 2 * cost.host.optimizer_state
    if device == "cpu":
        on_device = ram = on_device + ram
    return Memory(device_bytes=on_device, ram_bytes=ram, shared_bytes=SHARED_COPIES * parameters)


def usable_precision(precision: str, device: torch.device) -> str:
    """The recipe's precision where this device computes it fast, else float32."""
    if device.type == "cpu" or (precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False)):
        return "fp32"
    return precision


def most_reported(settings: SwarmSettings, ranks: int) -> int:
    """Samples that each of a peer's processes may report at once."""
    return max(1, settings.target_batch_size // REPORTS_PER_STEP // ranks)


def given_batch_size(settings: SwarmSettings, batch_size: int | None, ranks: int) -> int | None:
    """What the user has chosen; in "diloco" mode else the recipe's, which the schedule is made for."""
    own_step = max(1, settings.recipe.data.batch_size // ranks)
    return batch_size or (own_step if settings.wire.mode == "diloco" else None)


def fit_memory(
    settings: SwarmSettings,
    device: torch.device,
    there: Memory,
    *,
    precision: str | None = None,
    batch_size: int | None = None,
    ranks: int = 1,
) -> Fit:
    """The most samples at once that fit, with the recipe's [memory] or, where not even one fits with it, with the
    fastest plan that does; for each of `ranks` processes, which have a device each.

    ValueError where none does; it tells what is needed.
    """
    config = DalleConfig.from_dict(settings.recipe.model)
    precision = precision or usable_precision(settings.recipe.memory.precision, device)
    memory = dataclasses.replace(settings.recipe.memory, precision=precision, offload_optimizer=True, micro_batches=1)
    memory.activations_for(config)
    batch_size = given_batch_size(settings, batch_size, ranks)
    limit = batch_size or most_reported(settings, ranks)

    def room_for(plan: MemoryRecipe) -> int:
        def peak_of(size: int) -> int:
            return need_of(settings, plan, size, device.type).device_bytes

        return bisect_right(range(1, limit + 1), FREE_SHARE * there.device_bytes, key=peak_of)

    samples = room_for(memory)
    if samples == 0:
        setup = setup_of(settings, precision, 1, "cuda")
        held = need_of(settings, memory, 1, device.type).device_bytes - cost_of(config, memory, setup).peak_bytes
        plan = fastest_plan(config, setup, FREE_SHARE * there.device_bytes - held)
        lean = {**dataclasses.asdict(plan), "offload_optimizer": True, "master_weights": memory.master_weights}
        memory = dataclasses.replace(memory, **lean)
        samples = max(1, room_for(memory))
    parts = 1 if batch_size is None else -(-batch_size // samples)
    samples = samples if batch_size is None else -(-batch_size // parts)
    memory = dataclasses.replace(memory, micro_batches=parts)
    return Fit(
        batch_size=batch_size or samples,
        memory=memory,
        samples_at_once=samples,
        need=need_of(settings, memory, samples, device.type),
    )


def measured(
    settings: SwarmSettings,
    fit: Fit,
    model: Dalle,
    *,
    chosen: bool = False,
    ranks: int = 1,
    seconds_of: Callable[[GradientComputer, int], float] | None = None,
) -> Fit:
    """The fit with the samples at once that are fastest, and as many parts as take about REPORT_S.

    Measured on the real model, where it is to be trained, with ever more samples at once. Where the user has `chosen`
    the batch size, it is only told how long it takes.
    """
    seconds_of = seconds_of or batch_seconds
    gradients = GradientComputer(model, dataclasses.replace(fit.memory, compile=False), 1)
    if chosen:
        return dataclasses.replace(fit, seconds=seconds_of(gradients, fit.samples_at_once))
    samples, seconds = 1, seconds_of(gradients, 1)
    while 2 * samples <= fit.samples_at_once and 2 * seconds <= SLOWEST_REPORT_S:
        try:
            longer = seconds_of(gradients, 2 * samples)
        except torch.OutOfMemoryError:  # others take what was free
            break
        if longer > 2 * FASTER * seconds:
            break
        samples, seconds = 2 * samples, longer
    parts = min(max(1, round(REPORT_S / seconds)), max(1, most_reported(settings, ranks) // samples))
    memory = dataclasses.replace(fit.memory, micro_batches=parts)
    need = need_of(settings, memory, samples, gradients.device.type)
    return Fit(batch_size=samples * parts, memory=memory, samples_at_once=samples, need=need, seconds=seconds)


def batch_seconds(gradients: GradientComputer, samples: int) -> float:
    """Seconds of one forward and backward of so many samples, after one that warms up."""
    config = gradients.model.config
    gradients.micro_batch_size = samples
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        torch.randint(config.text_vocab_size, (samples, config.text_len), generator=generator),
        torch.randint(config.image_vocab_size, (samples, config.image_len), generator=generator),
    )
    for _ in range(2):
        started = time.perf_counter()
        loss = gradients.accumulate_gradient(batch)
        loss.item()  # waits for the device
        seconds = time.perf_counter() - started
        if seconds > SLOWEST_REPORT_S:  # what warming up adds does not matter then
            break
    return seconds


def describe(fit: Fit, there: Memory, device: torch.device) -> str:
    """What it needs of what is there, in words."""
    need = fit.need
    words = f"needs {human_bytes(need.ram_bytes)} of {human_bytes(there.ram_bytes)} RAM"
    if device.type == "cuda":
        words = f"needs {human_bytes(need.device_bytes)} of {human_bytes(there.device_bytes)} on the GPU, {words[6:]}"
    return (
        f"{words}, for {fit.samples_at_once} sample{'s' * (fit.samples_at_once > 1)} at once ({fit.memory.precision})"
    )
