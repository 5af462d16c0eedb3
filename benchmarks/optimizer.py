"""How fast is an optimizer step on the CPU, and how large are its statistics? `python -m benchmarks.optimizer`.

The tensors have the shapes of the paper's model; both forms of LAMB keep 8-bit statistics on the CPU.
"""

import os
from statistics import median

import torch
from torch import nn

from benchmarks.report import Column, make_parser, print_figures, print_json
from benchmarks.timing import in_turns, timed
from dalle_lean.optim.lamb import Lamb, has_numba

BLOCK = [(3072, 1024), (1024, 1024), (8192, 1024), (1024, 4096), (1024,), (8192,), (4096,)]
SHAPES = BLOCK * 5 + [(40548, 1024), (40548,)]
ADAMW = "torch AdamW fp32, fused"
COLUMNS = (
    Column("optimizer", "name"),
    Column("M parameters/s", "parameters_per_s", ".0f", 1e6),
    Column("slowest", "slowest", ".0f", 1e6),
    Column("fastest", "fastest", ".0f", 1e6),
    Column("of AdamW", "of_adamw", ".2f"),
    Column("CPU ns/parameter", "cpu_ns_per_parameter", ".1f"),
    Column("statistics, bytes/parameter", "statistics_bytes_per_parameter", ".3f"),
    Column("first step, s", "first_step_s", ".1f"),
)


def main() -> None:
    """Measure in turns, print the table and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each optimizer (default: %(default)s)")
    rounds: int = parser.parse_args().rounds
    load_average = os.getloadavg()[0]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 1e-3
    numel = sum(parameter.numel() for parameter in parameters)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "LAMB 8-bit, plain torch": Lamb(parameters, lr=1e-3, fused=False),
        ADAMW: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    }
    if has_numba():
        optimizers = {"LAMB 8-bit, compiled": Lamb(parameters, lr=1e-3, fused=True), **optimizers}
    steps = in_turns(
        {name: lambda optimizer=optimizer: timed(optimizer.step) for name, optimizer in optimizers.items()}, rounds + 1
    )
    figures = {}
    for name, (first, *later) in steps.items():
        seconds = [step.wall_s for step in later]
        figures[name] = {
            "parameters_per_s": numel / median(seconds),
            "slowest": numel / max(seconds),
            "fastest": numel / min(seconds),
            "cpu_ns_per_parameter": median(step.cpu_s for step in later) / numel * 1e9,
            "first_step_s": first.wall_s,
            "statistics_bytes_per_parameter": statistics_bytes(optimizers[name]) / numel,
        }
    for figure in figures.values():
        figure["of_adamw"] = figure["parameters_per_s"] / figures[ADAMW]["parameters_per_s"]
    print_figures([{"name": name, **figure} for name, figure in figures.items()], COLUMNS)
    settings = {"parameters": numel, "threads": torch.get_num_threads(), "load_average_before": load_average}
    print_json("optimizer", {"optimizers": figures, **settings})


def statistics_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


if __name__ == "__main__":
    main()
