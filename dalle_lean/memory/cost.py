"""What a training step costs: parameters, arithmetic, and bytes by kind on the device and on the host.

The bytes that a memory plan decides are computed in `peak_memory.py`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dalle_lean.memory.flops import Flop, forward_flop, step_flop
from dalle_lean.memory.parameters import muon_sizes, parameter_sizes
from dalle_lean.memory.peak_memory import Bytes, PeakPoint, peak_points
from dalle_lean.memory.setup import TrainingSetup
from dalle_lean.model.config import DalleConfig
from dalle_lean.model.memory_plan import MemoryPlan

BITSANDBYTES_BLOCK, BITSANDBYTES_SMALLEST = 256, 4096
"""Elements per scale; the smallest tensor with 8-bit statistics."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a training step."""

    parameters: int
    forward: Flop
    step: Flop
    moment: str
    """The part of the step in which device memory peaks."""
    device: Bytes
    """Bytes by kind at that peak."""
    host: Bytes
    """Bytes of what is offloaded; zeros if the host is the device."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on the device."""
        return self.device.total

    def to_dict(self) -> dict[str, Any]:
        """All fields and their sums, ready for JSON."""
        sums = {
            "forward_flop": self.forward.total,
            "step_flop": self.step.total,
            "device_bytes": self.device.total,
            "host_bytes": self.host.total,
        }
        return {**dataclasses.asdict(self), **sums}


def cost_of(config: DalleConfig, plan: MemoryPlan, setup: TrainingSetup) -> Cost:
    """The cost of one forward and backward, with weights, gradients and optimizer in place.

    Gradients are assumed to exist already (accumulated, or zeroed). Not included: the device's context, kernels'
    workspaces, fragmentation, the batch's ids.
    """
    sizes = parameter_sizes(config)
    fused = plan.fuses_attention(config, setup.device, setup.compute_bytes)
    forward, step = forward_flop(config, setup.batch), step_flop(config, setup.batch, plan, fused)
    at = list(peak_points(config, plan, setup))
    return cost_at_peak(sizes, forward, step, at, plan, setup, muon=muon_sizes(config))


def cost_at_peak(
    sizes: Sequence[int],
    forward: Flop,
    step: Flop,
    at: Sequence[PeakPoint],
    plan: MemoryPlan,
    setup: TrainingSetup,
    muon: Sequence[int] = (),
) -> Cost:
    """The cost of a model with parameter tensors of these sizes, at the point where device memory peaks.

    muon: sizes of the tensors that Muon takes.
    """
    host, resident = persistent_bytes(sizes, plan, setup, muon)
    moment, peak = max(at, key=lambda point: point[1].total)
    return Cost(parameters=sum(sizes), forward=forward, step=step, moment=moment, device=resident + peak, host=host)


def persistent_bytes(
    sizes: Sequence[int], plan: MemoryPlan, setup: TrainingSetup, muon: Sequence[int] = ()
) -> tuple[Bytes, Bytes]:
    """(host, device) bytes that persist from step to step; an offloaded LAMB's are on the host."""
    is_offloaded = setup.is_lamb and plan.offload_optimizer and setup.device != "cpu"
    has_masters = setup.is_lamb and plan.master_weights and setup.weight_bytes < 4
    own = Bytes(
        optimizer_state=optimizer_state_bytes(sizes, setup, muon),
        master_weights=4 * sum(sizes) if has_masters else 0,
        # The largest tensor's gradient in float32; without a master copy its weight too.
        transfer=(4 if has_masters else 8) * max(sizes) if is_offloaded else 0,
    )
    weights = sum(sizes) * setup.weight_bytes
    resident = Bytes(weights=weights, gradients=weights)
    return (own, resident) if is_offloaded else (Bytes(), own + resident)


def optimizer_state_bytes(sizes: Sequence[int], setup: TrainingSetup, muon: Sequence[int]) -> int:
    """Two statistics per parameter, one under Muon.

    float32: 8 bytes a parameter (adamw: in the weights' type, plus a step count of 4 bytes a tensor). 8 bits: 2 bytes a
    parameter and 8 a block; small tensors stay float32.
    """
    if setup.optimizer == "adamw":
        return 2 * sum(sizes) * setup.weight_bytes + 4 * len(sizes)
    if setup.optimizer == "muon":
        return (2 * sum(sizes) - sum(muon)) * setup.weight_bytes + 4 * (len(sizes) - len(muon))
    if setup.optimizer == "lamb":
        return 8 * sum(sizes)
    block, smallest = BITSANDBYTES_BLOCK, BITSANDBYTES_SMALLEST
    if setup.is_lamb:
        block, smallest = setup.block_size, setup.min_eight_bit_numel
    return sum(2 * size + 8 * -(-size // block) if size >= smallest else 8 * size for size in sizes)
