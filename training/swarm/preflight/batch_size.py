"""Chooses the local batch and the memory plan that fit this machine.

They only trade memory for time: to other peers, only the speed differs.
"""

import dataclasses
import math
import shutil
import time
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import torch

from dalle_lean import Dalle
from dalle_lean.free_memory import free_bytes, free_ram_bytes
from dalle_lean.memory import TrainingSetup, cost_of, fastest_plan
from dalle_lean.memory.cost import Cost
from training.data.loader import Batch
from training.run.recipe import MemoryRecipe
from training.step.data_parallel import replicated_plan, runnable_plan
from training.step.gradients import GradientComputer
from training.swarm.config import SwarmSettings, check_precision

REPORT_S = 3.0
"""Compute time between two reports to the others: frequent enough to show progress, at negligible cost."""
TIMINGS = 3
MAX_REPORT_S = 10.0
MAX_TIME_RATIO = 0.9
"""Largest ratio of the times per sample at which doubling the samples at once pays."""
MIN_REPORTS_PER_STEP = 8
"""Of a single peer; with fewer, a step of the swarm would far exceed its batch size."""
USABLE_SHARE = 0.9
"""Usable share of the free memory; the rest is for fragmentation and kernels."""
PROCESS_BYTES = 1_200_000_000
"""Python, torch and hivemind's processes, before the first tensor."""
HOST_COPIES = 5
"""float32 copies of all parameters in hivemind: the optimizer's weights, averaged gradients, two of the tensors on the
wire, and a state that is sent or received."""
SHARED_COPIES = 2
"""The first two of HOST_COPIES, which are in shared memory."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on the device, in RAM, and in RAM shared between processes; a CPU's device memory is its RAM."""

    device_bytes: int
    ram_bytes: int
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The local batch and its memory plan.

    Args:
        batch_size: samples between two reports to the others; in "diloco" mode, of an inner step.
        memory: the recipe's [memory] or the fastest plan that fits, with `micro_batches` parts per batch.
        needed: memory needed.
        seconds: compute time of a part; nan before it is measured.
    """

    batch_size: int
    memory: MemoryRecipe
    needed: Memory
    seconds: float = math.nan

    @property
    def samples_at_once(self) -> int:
        """Samples per part."""
        return -(-self.batch_size // self.memory.micro_batches)

    @property
    def report_s(self) -> float:
        return self.seconds * self.memory.micro_batches


def free_memory(device: torch.device) -> Memory:
    ram = free_ram_bytes()
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else ram
    return Memory(device_bytes=free_bytes(device) if device.type == "cuda" else ram, ram_bytes=ram, shared_bytes=shared)


def state_bytes(settings: SwarmSettings) -> int:
    """Size of the state that a newcomer downloads: weights and the shared optimizer's statistics."""
    cost = cost_of(settings.model, MemoryRecipe(offload_optimizer=True), setup_of(settings, "fp32", 1))
    return 4 * cost.parameters + statistics_bytes(settings, cost)


def statistics_bytes(settings: SwarmSettings, cost: Cost) -> int:
    """Size of the statistics of the optimizer that all peers share; in "diloco" mode, the outer one's momentum."""
    if settings.wire.mode == "diloco":
        return 4 * cost.parameters if settings.wire.outer_momentum else 0
    return cost.host.optimizer_state


def setup_of(settings: SwarmSettings, precision: str, samples: int) -> TrainingSetup:
    """A step as the memory calculator sees it; as on CUDA, since the optimizer is always on the host."""
    setup = settings.recipe.override(precision=precision).training_setup()
    return dataclasses.replace(setup, batch=samples)


def memory_needed(settings: SwarmSettings, memory: MemoryRecipe, samples: int, device_type: str) -> Memory:
    """Memory for `samples` at once, including hivemind's copies; `device_type` is "cuda" or "cpu"."""
    plan = dataclasses.replace(memory, offload_optimizer=True)
    cost = cost_of(settings.model, plan, setup_of(settings, memory.precision, samples))
    parameters = 4 * cost.parameters
    on_device = cost.peak_bytes + parameters  # hivemind accumulates gradients there
    inner = cost.host.optimizer_state if settings.wire.mode == "diloco" else 0
    ram = PROCESS_BYTES + HOST_COPIES * parameters + 2 * statistics_bytes(settings, cost) + inner
    if device_type == "cpu":
        on_device = ram = on_device + ram
    return Memory(device_bytes=on_device, ram_bytes=ram, shared_bytes=SHARED_COPIES * parameters)


def usable_precision(precision: str, device: torch.device) -> str:
    """The recipe's precision if this device supports it natively, else fp32."""
    if device.type == "cpu" or (precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False)):
        return "fp32"
    return precision


def max_report_samples(settings: SwarmSettings, ranks: int) -> int:
    """Most samples that each of a peer's processes may report at once."""
    return max(1, settings.target_batch_size // MIN_REPORTS_PER_STEP // ranks)


def plan_batch(
    settings: SwarmSettings,
    device: torch.device,
    free: Memory,
    *,
    precision: str | None = None,
    batch_size: int | None = None,
    ranks: int = 1,
) -> BatchPlan:
    """The most samples at once that fit with the recipe's [memory] or, if none fits, with the fastest plan that fits.

    Args:
        batch_size: the user's choice; in "diloco" mode, by default the recipe's, which the schedule assumes.
        ranks: number of processes, each with its own device.

    Raises ValueError if nothing fits; it says what is needed.
    """
    config = settings.model
    precision = precision or usable_precision(settings.recipe.memory.precision, device)
    memory = dataclasses.replace(settings.recipe.memory, precision=precision, offload_optimizer=True, micro_batches=1)
    memory = runnable_plan(memory, device)
    check_precision(memory.precision)
    if ranks > 1:
        memory = replicated_plan(memory)
    memory.activations_for(config)
    if batch_size is None and settings.wire.mode == "diloco":
        batch_size = max(1, settings.recipe.data.batch_size // ranks)
    limit = batch_size or max_report_samples(settings, ranks)
    usable_bytes = USABLE_SHARE * free.device_bytes

    def needed(plan: MemoryRecipe, samples: int) -> Memory:
        return memory_needed(settings, plan, samples, device.type)

    def max_samples(plan: MemoryRecipe) -> int:
        return bisect_right(range(1, limit + 1), usable_bytes, key=lambda samples: needed(plan, samples).device_bytes)

    samples = max_samples(memory)
    if samples == 0:
        setup = setup_of(settings, memory.precision, 1)
        besides_bytes = needed(memory, 1).device_bytes - cost_of(config, memory, setup).peak_bytes
        plan = fastest_plan(config, setup, usable_bytes - besides_bytes, fused_attention=memory.fused_attention)
        lean = {**dataclasses.asdict(plan), "offload_optimizer": True, "master_weights": memory.master_weights}
        memory = dataclasses.replace(memory, **lean)
        if ranks > 1:
            memory = replicated_plan(memory)
        samples = max(1, max_samples(memory))
    if batch_size is not None:
        memory = dataclasses.replace(memory, micro_batches=-(-batch_size // samples))
        samples = -(-batch_size // memory.micro_batches)
    return BatchPlan(batch_size=batch_size or samples, memory=memory, needed=needed(memory, samples))


def measure_batch(
    settings: SwarmSettings, plan: BatchPlan, model: Dalle, *, fixed: bool = False, ranks: int = 1
) -> BatchPlan:
    """The plan with the fastest number of samples at once, and enough parts to take about REPORT_S.

    Measures the real model on its device, doubling the samples at once. `fixed` keeps the batch and only measures it.
    """
    gradients = GradientComputer(model, dataclasses.replace(plan.memory, compile=False), 1)
    if fixed:
        return dataclasses.replace(plan, seconds=batch_seconds(gradients, plan.samples_at_once))
    samples, seconds = 1, batch_seconds(gradients, 1)
    while 2 * samples <= plan.samples_at_once and 2 * seconds <= MAX_REPORT_S:
        try:
            longer = batch_seconds(gradients, 2 * samples)
        except torch.OutOfMemoryError:  # another program took the memory
            break
        if longer > 2 * MAX_TIME_RATIO * seconds:
            break
        samples, seconds = 2 * samples, longer
    parts = min(max(1, round(REPORT_S / seconds)), max(1, max_report_samples(settings, ranks) // samples))
    memory = dataclasses.replace(plan.memory, micro_batches=parts)
    needed = memory_needed(settings, memory, samples, gradients.device.type)
    return BatchPlan(batch_size=samples * parts, memory=memory, needed=needed, seconds=seconds)


def batch_seconds(gradients: GradientComputer, samples: int) -> float:
    """Seconds of a forward and backward pass: the least of TIMINGS after a warm-up, as other programs may interfere."""
    config = gradients.model.config
    gradients.micro_batch_size = samples
    generator = torch.Generator().manual_seed(0)
    batch = Batch(
        torch.randint(config.text_vocab_size, (samples, config.text_len), generator=generator),
        torch.randint(config.image_vocab_size, (samples, config.image_len), generator=generator),
    )
    timings: list[float] = []
    while len(timings) <= TIMINGS:
        started = time.perf_counter()
        gradients.accumulate_gradient(batch).item()  # item() waits for the device
        timings.append(time.perf_counter() - started)
        counted = timings[1:] if gradients.device.type == "cuda" else timings  # there the first may compile
        if sum(counted) > TIMINGS * MAX_REPORT_S:
            break
    return min(timings)
