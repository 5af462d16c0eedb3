"""How fast, and in how much memory, does the decoder train? `python -m benchmarks.training [--versus]`.

Tokens per second and peak memory of one forward and backward in fp32 on the CPU: every memory plan beside the two of
dalle-pytorch 1.6.6, reversible=True and reversible=False. --versus installs it into an environment of its own,
--reference PYTHON names an interpreter that has it; without either, only ours is measured.

All train the same function: same weights (converted, through a safetensors file), same batch, gradients added to
existing ones. Each is a process of its own, and they take turns. A speed-up is the median over the turns of the
reference's seconds over ours in the same turn. Losses and gradient norms must agree before anything is timed.
benchmarks/worker_training.py defines the memory: "peak" is all resident memory, "step" what the step itself added.

`--paper` measures one step of the paper's model at batch 1 instead, and the share that the step's arithmetic reaches of
the machine's matmul rate (fp32, 1280x1024 by 1024x8192, in the same run, the faster of before and after). The
arithmetic counts the products of dalle_lean/memory/flops.py: projections and attention in forward, again if they are
recomputed, and twice in backward; the output layer in forward and twice in backward.
"""

import dataclasses
import os
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from benchmarks.child_process import Child
from benchmarks.reference import (
    REFERENCE,
    SMALL,
    add_reference_options,
    find_reference,
    random_batch,
    reference_task,
    weights_of,
)
from benchmarks.report import Column, check_positive, make_parser, print_figures, print_json
from benchmarks.roofline import matmul_rate
from benchmarks.timing import in_turns, median_ratio
from dalle_lean import DalleConfig
from dalle_lean.errors import UserError
from dalle_lean.memory import MemoryPlan
from dalle_lean.memory.flops import forward_flop

BATCH_SIZE = 4
PAPER_PLANS = ("reversible", "+ gradients in place")
AGREEMENT = 1e-4
"""Largest allowed relative difference of losses and gradient norms in fp32."""
MB = 1e6
COLUMNS = (
    Column("function", "function"),
    Column("way", "way"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("seconds", "seconds", ",.2f"),
    Column("speed-up", "speed_up", ".2f"),
    Column("peak, MB", "peak_bytes", ",.0f", MB),
    Column("step, MB", "step_bytes", ",.0f", MB),
    Column("step, less by", "step_less_by", ".1f"),
    Column("of the matmul rate", "matmul_rate_reached", ".0%"),
)


def in_pieces(whole: MemoryPlan, name: str) -> dict[str, MemoryPlan]:
    """A plan that recomputes branches, then the same in pieces; each "+" adds to the plan above it."""
    logits = dataclasses.replace(whole, loss_tokens=256)
    branches = dataclasses.replace(logits, samples=1, attention_heads=4, feed_forward_tokens=256)
    return {
        name: whole,
        "+ logits in pieces": logits,
        "+ branches in pieces": branches,
        "+ gradients in place": dataclasses.replace(branches, grads_in_place=True),
    }


KEEP = MemoryPlan(activations="keep", loss_tokens=None)
REVERSIBLE = {"keep": KEEP, **in_pieces(dataclasses.replace(KEEP, activations="reversible"), "reversible")}
"""For configs with reversible=True."""
SEQUENTIAL = {
    "keep": KEEP,
    "selective": dataclasses.replace(KEEP, activations="selective"),
    **in_pieces(dataclasses.replace(KEEP, activations="checkpoint"), "checkpoint"),
}
"""For configs with reversible=False."""


class Comparison(NamedTuple):
    """A function and the ways to train it that take turns."""

    config: DalleConfig
    batch_size: int
    plans: dict[str, MemoryPlan]
    turns: int
    """Timed steps of each way after its first; with 0, the first itself is timed."""


class Result(NamedTuple):
    """The measurements of one way."""

    name: str
    first: dict[str, float]
    """The first step: base_bytes, weight_bytes, peak_bytes, step_bytes, loss, gradient_norm, seconds."""
    seconds: list[float]
    """Of each turn; of the first step if there were none."""


def main() -> None:
    """Measure, print the table and the JSON line."""
    parser = make_parser(__doc__)
    add_reference_options(parser)
    parser.add_argument("--paper", action="store_true", help="one step of the paper's model instead, in minutes")
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default: %(default)s)")
    options = parser.parse_args()
    check_positive(parser, turns=options.turns, threads=options.threads)
    torch.set_num_threads(options.threads)
    load_average = os.getloadavg()[0]
    try:
        reference = find_reference(options)
        comparisons = [paper_comparison(reference)] if options.paper else small_comparisons(options.turns)
        rate = matmul_rate(None) if options.paper else None
        results = [run(comparison, reference, options.threads) for comparison in comparisons]
    except UserError as mistake:
        parser.error(str(mistake))
    rate = max(rate, matmul_rate(None)) if rate else None
    figures: list[dict[str, Any]] = []
    for comparison, found in zip(comparisons, results, strict=True):
        figures += way_figures(comparison, found, rate)
    print_figures(figures, COLUMNS)
    loss, gradient = (max(line[f"{name}_difference"] for line in figures) for name in ("loss", "gradient_norm"))
    print(f"Losses agree to {loss:.1e} and gradient norms to {gradient:.1e} of their value.")
    if reference is None:
        print("dalle-pytorch was not measured: --versus installs it, --reference names an interpreter that has it.")
    settings = {"threads": options.threads, "load_average": load_average, "matmul_flop_per_s": rate}
    print_json("training_paper" if options.paper else "training", {**settings, "ways": figures})


def stream_name(reversible: bool) -> str:
    """The name of a function in tables."""
    return "reversible" if reversible else "sequential"


def small_comparisons(turns: int) -> list[Comparison]:
    """The two functions of the default run: reversible streams, and a single stream."""
    sequential = dataclasses.replace(SMALL, reversible=False)
    return [Comparison(SMALL, BATCH_SIZE, REVERSIBLE, turns), Comparison(sequential, BATCH_SIZE, SEQUENTIAL, turns)]


def paper_comparison(reference: str | None) -> Comparison:
    """One step of the paper's model, with dalle-pytorch's convolution window if that takes part."""
    config = DalleConfig.paper()
    if reference is not None:
        config = dataclasses.replace(config, conv_window="corner")
    return Comparison(config, 1, {name: REVERSIBLE[name] for name in PAPER_PLANS}, 0)


def run(comparison: Comparison, reference: str | None, threads: int = 2) -> list[Result]:
    """Run the first step of each way, then the turns; the reference, if any, comes first."""
    config = comparison.config
    # The warm-up model, with every kind of attention.
    tiny = dataclasses.replace(config, text_len=4, image_side=4, num_layers=6, hidden_size=48, num_heads=2)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        weights, batch, tiny_batch = (str(Path(folder) / name) for name in ("weights", "batch", "tiny_batch"))
        save_file(weights_of(config), weights)
        save_file(random_batch(config, comparison.batch_size), batch)
        save_file(random_batch(tiny, 1), tiny_batch)

        def start(python: str, module: str, model: dict[str, Any], warm_up: dict[str, Any]) -> Child:
            model |= {"weights": weights, "batch": batch}
            warm_up |= {"weights": None, "batch": tiny_batch}
            return stack.enter_context(Child(python, module, {"threads": threads, "model": model, "tiny": warm_up}))

        starts = {}
        if reference is not None:
            tasks = reference_task(config), reference_task(tiny)
            starts[REFERENCE] = partial(start, reference, "benchmarks.worker_dalle_pytorch", *tasks)
        for name, plan in comparison.plans.items():
            fields = dataclasses.asdict(plan)
            tasks = {"config": config.to_dict(), "plan": fields}, {"config": tiny.to_dict(), "plan": fields}
            starts[name] = partial(start, sys.executable, "benchmarks.worker_dalle_lean", *tasks)
        children: dict[str, Child] = {}

        def first_step(name: str) -> dict[str, float]:
            children[name] = starts[name]()
            return {**children[name].answer(), **children[name].ask()}

        first = in_turns({name: partial(first_step, name) for name in starts}, 1, "First steps")
        results = [Result(name, figures, [figures["seconds"]]) for name, [figures] in first.items()]
        check_agreement(results)
        if not comparison.turns:
            return results
        steps = in_turns({name: child.ask for name, child in children.items()}, comparison.turns, "Training")
    return [result._replace(seconds=[step["seconds"] for step in steps[result.name]]) for result in results]


def check_agreement(results: list[Result]) -> None:
    """UserError unless all have the loss and gradient norm of the first."""
    for result in results:
        for measure in ("loss", "gradient_norm"):
            if not relative_difference(result, results[0], measure) <= AGREEMENT:
                raise UserError(
                    f"{measure} of {result.name} is {result.first[measure]} and of {results[0].name} "
                    f"{results[0].first[measure]}: they do not train the same function"
                )


def relative_difference(result: Result, other: Result, measure: str) -> float:
    """The difference of a measure of the first step from the other's, relative to the other's."""
    return abs(result.first[measure] - other.first[measure]) / abs(other.first[measure])


def way_figures(comparison: Comparison, results: list[Result], rate: float | None) -> list[dict[str, Any]]:
    """The figures of every way, compared with the reference, if any; `rate` in FLOP/s."""
    config, reference = comparison.config, results[0] if results[0].name == REFERENCE else None
    figures = []
    for result in results:
        seconds = median(result.seconds)
        line: dict[str, Any] = {
            "function": stream_name(config.reversible),
            "way": result.name,
            **result.first,
            "seconds": seconds,
            "tokens_per_s": comparison.batch_size * config.sequence_len / seconds,
            "loss_difference": relative_difference(result, results[0], "loss"),
            "gradient_norm_difference": relative_difference(result, results[0], "gradient_norm"),
        }
        if reference is not None:
            line["speed_up"] = median_ratio(reference.seconds, result.seconds)
            line["step_less_by"] = reference.first["step_bytes"] / result.first["step_bytes"]
        if rate is not None:
            again = result.name == REFERENCE or comparison.plans[result.name].activations_for(config) != "keep"
            line["flop"] = step_flop(config, comparison.batch_size, forward_again=again)
            line["matmul_rate_reached"] = line["flop"] / seconds / rate
        figures.append(line)
    return figures


def step_flop(config: DalleConfig, batch_size: int, *, forward_again: bool) -> float:
    """Operations of the matrix products in one forward and backward; see the top of this file."""
    forward = forward_flop(config, batch_size)
    return (3 + forward_again) * (forward.projections + forward.attention) + 3 * forward.output


if __name__ == "__main__":
    main()
