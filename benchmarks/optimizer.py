"""How fast is an optimizer step on the CPU, and what does it keep? `python -m benchmarks.optimizer`.

The tensors are those of the paper's model; statistics are on the CPU and 8-bit for both forms of LAMB.
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch
from torch import nn

from benchmarks.report import print_json, print_table
from dalle_lean.optim.lamb import Lamb, has_numba

BLOCK = [(3072, 1024), (1024, 1024), (8192, 1024), (1024, 4096)]
VECTORS = [(1024,), (8192,), (4096,)]
SHAPES = (BLOCK + VECTORS) * 5 + [(40548, 1024), (40548,)]


def main() -> None:
    """Measure in turns, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="Timed steps of each optimizer. [default: 5]")
    rounds: int = parser.parse_args().rounds
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
    numel = sum(parameter.numel() for parameter in parameters)
    optimizers = {
        "LAMB 8-bit, compiled": Lamb(parameters, lr=1e-3, fused=True) if has_numba() else None,
        "LAMB 8-bit, plain torch": Lamb(parameters, lr=1e-3, fused=False),
        "torch AdamW fp32, fused": torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    }
    found = {name: optimizer for name, optimizer in optimizers.items() if optimizer is not None}
    busy_before = os.getloadavg()[0]
    first_s = {name: timed(optimizer)[0] for name, optimizer in found.items()}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, optimizer in found.items():
            wall_s, cpu_s = timed(optimizer)
            seconds[name].append(wall_s)
            cpu_seconds[name].append(cpu_s)
    figures = {
        name: {
            "parameters_per_s": numel / statistics.median(seconds[name]),
            "slowest": numel / max(seconds[name]),
            "fastest": numel / min(seconds[name]),
            "cpu_ns_per_parameter": statistics.median(cpu_seconds[name]) / numel * 1e9,
            "first_step_s": first_s[name],
            "statistics_bytes_per_parameter": statistics_bytes(optimizer) / numel,
        }
        for name, optimizer in found.items()
    }
    reference = figures["torch AdamW fp32, fused"]["parameters_per_s"]
    rows = [
        (
            name,
            f"{figure['parameters_per_s'] / 1e6:.0f} ({figure['slowest'] / 1e6:.0f} to {figure['fastest'] / 1e6:.0f})",
            f"{figure['parameters_per_s'] / reference:.2f}",
            f"{figure['cpu_ns_per_parameter']:.1f}",
            f"{figure['statistics_bytes_per_parameter']:.3f}",
            f"{figure['first_step_s']:.1f}",
        )
        for name, figure in figures.items()
    ]
    header = ("M parameters/s", "of AdamW", "CPU ns/parameter", "statistics, bytes/parameter", "first step, s")
    print_table(("optimizer", *header), rows)
    print_json(
        "optimizer",
        {
            "optimizers": figures,
            "parameters": numel,
            "threads": torch.get_num_threads(),
            "load_average_before": busy_before,
        },
    )


def timed(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """(seconds, CPU seconds of all threads) of one step; the latter hardly depend on what else runs."""
    started, cpu_started = time.perf_counter(), time.process_time()
    optimizer.step()
    return time.perf_counter() - started, time.process_time() - cpu_started


def statistics_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    values: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


if __name__ == "__main__":
    main()
