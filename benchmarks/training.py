"""How fast, and in how much memory, does the decoder train? `python -m benchmarks.training [--versus]`.

Tokens per second and peak memory of one forward and backward in fp32 on the CPU: every memory plan beside
dalle-pytorch 1.6.6's own two ways, reversible=True and reversible=False. --versus installs that into an environment of
its own, --reference PYTHON names an interpreter that has it; with neither ours is measured alone.

Both train the same function: same weights (converted, through a safetensors file), same batch, gradients added to
existing ones. Each is a process of its own, with the torch of its own environment, and they take turns: A B C A B C ...
A speed-up is the median over the turns of the reference's seconds divided by ours in the same turn. Losses and gradient
norms must agree before anything is timed. benchmarks/child_process.py defines the memory: "peak" is all that was
resident, "step" what the step itself added to base, weights and gradients.

`--paper` takes one step of the paper's model at batch 1 instead and tells what share of the machine's matrix product
rate (fp32, 1280x1024 by 1024x8192, in the same run, the faster of before and after) the step's arithmetic reached. The
arithmetic counts the matrix products that are due: projections, and attention over the pairs that the masks allow, in
forward, again where nothing is kept, and twice in backward; the output layer in forward and twice in backward.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.child_process import Child
from benchmarks.plans import REVERSIBLE, SEQUENTIAL
from benchmarks.reference import REFERENCE, add_reference_options, find_reference
from benchmarks.report import print_json, print_table
from dalle_lean import Dalle, DalleConfig
from dalle_lean.convert import to_dalle_pytorch
from dalle_lean.errors import UserError
from dalle_lean.memory import MemoryPlan
from dalle_lean.model.masks import attention_mask
from dalle_lean.terminal import progress_bar

SMALL = DalleConfig(
    text_vocab_size=4096,
    text_len=64,
    image_vocab_size=1024,
    image_side=16,
    hidden_size=256,
    num_layers=16,
    num_heads=4,
    head_size=64,
    conv_window="corner",  # what dalle-pytorch has had since 1.5.0
)
BATCH_SIZE = 4
TURNS = 5
PAPER_PLANS = ("reversible", "+ gradients in place")
MATMUL_SIZES = (1280, 1024, 8192)
THEIR_KINDS = {"row": "axial_row", "column": "axial_col", "conv": "conv_like", "full": "full"}
AGREEMENT = 1e-4
"""Largest relative difference of losses and gradient norms in fp32."""
MB = 1e6
COLUMNS = (
    ("tokens/s", "tokens_per_s", ",.0f", 1),
    ("seconds", "seconds", ",.2f", 1),
    ("speed-up", "speed_up", ".2f", 1),
    ("peak, MB", "peak_bytes", ",.0f", MB),
    ("step, MB", "step_bytes", ",.0f", MB),
    ("step, less by", "step_less_by", ".1f", 1),
    ("of the matmul rate", "matmul_rate_reached", ".0%", 1),
)
"""Title, figure, format, unit; only what was measured is shown."""


class Contest(NamedTuple):
    """A function and the ways to train it that take turns."""

    config: DalleConfig
    batch_size: int
    plans: dict[str, MemoryPlan]
    turns: int
    """Timed steps of each after its first; 0 times the first itself."""


class Result(NamedTuple):
    """What one way did."""

    name: str
    memory: dict[str, float]
    """base_bytes and weight_bytes."""
    first: dict[str, float]
    """The first step: peak_bytes, step_bytes, loss, gradient_norm."""
    seconds: list[float]
    """Of each turn."""


def main() -> None:
    """Measure, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_reference_options(parser)
    parser.add_argument("--paper", action="store_true", help="one step of the paper's model instead, in minutes")
    parser.add_argument("--turns", type=int, default=TURNS, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of each process (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args()
    for name in ("turns", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: must be at least 1")
    torch.set_num_threads(options.threads)
    try:
        reference = find_reference(options)
    except ValueError as mistake:
        parser.error(str(mistake))
    load_average = os.getloadavg()[0]
    contests = [paper_contest(reference)] if options.paper else small_contests(options.turns)
    rate = matmul_rate() if options.paper else None
    try:
        results = [run(contest, reference, options.threads) for contest in contests]
    except ValueError as mistake:
        parser.error(str(mistake))
    rate = max(rate, matmul_rate()) if rate else None
    figures = [line for contest, found in zip(contests, results, strict=True) for line in judge(contest, found, rate)]
    if not options.json:
        print_table(*table(figures))
        loss, gradient = (max(line[f"{name}_difference"] for line in figures) for name in ("loss", "gradient_norm"))
        print(f"Of one function, losses agree to {loss:.1e} and gradient norms to {gradient:.1e} of their value.")
        if reference is None:
            print("dalle-pytorch was not measured: --versus installs it, --reference names an interpreter that has it.")
    settings = {"threads": options.threads, "load_average": load_average, "matmul_flop_per_s": rate}
    print_json("training_paper" if options.paper else "training", {**settings, "ways": figures})


def small_contests(turns: int) -> list[Contest]:
    """The two functions of the default run: reversible streams, and a single one."""
    sequential = dataclasses.replace(SMALL, reversible=False)
    return [Contest(SMALL, BATCH_SIZE, REVERSIBLE, turns), Contest(sequential, BATCH_SIZE, SEQUENTIAL, turns)]


def paper_contest(reference: str | None) -> Contest:
    """One step of the paper's model, with dalle-pytorch's convolution window where it takes part."""
    config = DalleConfig.paper()
    if reference is not None:
        config = dataclasses.replace(config, conv_window="corner")
    return Contest(config, 1, {name: REVERSIBLE[name] for name in PAPER_PLANS}, 0)


def run(contest: Contest, reference: str | None, threads: int = 2) -> list[Result]:
    """Every way's first step one after the other, then the turns; the reference, where there is one, comes first."""
    config = contest.config
    # It warms a process up, so it has every kind of attention.
    tiny = dataclasses.replace(config, text_len=4, image_side=4, num_layers=6, hidden_size=48, num_heads=2)
    total = (len(contest.plans) + (reference is not None)) * (1 + contest.turns)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, progress_bar("Training", "steps") as on_step:
        weights, batch, tiny_batch = (str(Path(folder) / name) for name in ("weights", "batch", "tiny_batch"))
        save_file(weights_of(config), weights)
        save_file(random_batch(config, contest.batch_size), batch)
        save_file(random_batch(tiny, 1), tiny_batch)

        def start(python: str, module: str, task: Callable[[DalleConfig], dict[str, Any]]) -> Child:
            model = {"weights": weights, "batch": batch, **task(config)}
            warm_up = {"weights": None, "batch": tiny_batch, **task(tiny)}
            return stack.enter_context(Child(python, module, {"threads": threads, "model": model, "tiny": warm_up}))

        results: list[Result] = []
        children: list[Child] = []

        def add(name: str, child: Child) -> None:
            results.append(Result(name, child.answer(), child.ask(), []))
            children.append(child)
            on_step(len(children), total, name)

        if reference is not None:
            add(REFERENCE, start(reference, "benchmarks.worker_dalle_pytorch", their_task))
        for name, plan in contest.plans.items():
            fields = dataclasses.asdict(plan)

            def our_task(config: DalleConfig, fields: dict[str, Any] = fields) -> dict[str, Any]:
                return {"config": config.to_dict(), "plan": fields}

            add(name, start(sys.executable, "benchmarks.worker_dalle_lean", our_task))
        check_agreement(results)
        for turn in range(contest.turns):
            for place, (result, child) in enumerate(zip(results, children, strict=True), start=1):
                result.seconds.append(child.ask()["seconds"])
                on_step(len(children) * (1 + turn) + place, total, result.name)
    return results


def weights_of(config: DalleConfig) -> dict[str, Tensor]:
    """Fresh weights under dalle-pytorch's names, shared ones once; the table of positions is left to each side."""
    torch.manual_seed(0)
    published = to_dalle_pytorch(Dalle(config), "1.4")
    del published["transformer.pos_emb"]
    once = {value.data_ptr(): name for name, value in reversed(published.items())}
    return {name: published[name] for name in once.values()}


def random_batch(config: DalleConfig, size: int) -> dict[str, Tensor]:
    """Captions of random ids, each padded with zeros from somewhere on, and random codes."""
    generator = torch.Generator().manual_seed(1)
    text_ids = torch.randint(1, config.text_vocab_size, (size, config.text_len), generator=generator)
    lengths = torch.randint(1, config.text_len + 1, (size, 1), generator=generator)
    text_ids[torch.arange(config.text_len) >= lengths] = 0
    image_codes = torch.randint(config.image_vocab_size, (size, config.image_len), generator=generator)
    return {"text_ids": text_ids, "image_codes": image_codes}


def their_task(config: DalleConfig) -> dict[str, Any]:
    """The arguments of dalle_pytorch.DALLE that make it this config's function; ValueError where none do."""
    if "conv" in config.layer_kinds and config.conv_window != "corner":
        raise UserError(f"conv_window={config.conv_window!r}: dalle-pytorch 1.6.6 has the window 'corner' only")
    arguments = {
        "dim": config.hidden_size,
        "depth": config.num_layers,
        "heads": config.num_heads,
        "dim_head": config.head_size,
        "num_text_tokens": config.text_vocab_size,
        "text_seq_len": config.text_len,
        "attn_types": [THEIR_KINDS[kind] for kind in config.layer_kinds],
        "shared_attn_ids": config.layer_blocks,
        "shared_ff_ids": config.layer_blocks,
        "share_input_output_emb": config.tie_embeddings,
        "shift_tokens": config.token_shift,
        "rotary_emb": config.rotary,
        "loss_img_weight": config.image_loss_weight,
        "reversible": config.reversible,
    }
    return {
        "arguments": arguments,
        "image_side": config.image_side,
        "image_vocab_size": config.image_vocab_size,
    }


def check_agreement(results: list[Result]) -> None:
    """ValueError unless all have the first one's loss and gradient norm."""
    for result in results:
        for measure in ("loss", "gradient_norm"):
            difference = relative_difference(result, results[0], measure)
            if not difference <= AGREEMENT:
                raise UserError(
                    f"{measure} of {result.name} is {result.first[measure]} and of {results[0].name} "
                    f"{results[0].first[measure]}: they do not train the same function"
                )


def relative_difference(result: Result, other: Result, measure: str) -> float:
    """How far a measure of the first step is from the other's, in shares of that."""
    return abs(result.first[measure] - other.first[measure]) / abs(other.first[measure])


def judge(contest: Contest, results: list[Result], rate: float | None) -> list[dict[str, Any]]:
    """The figures of every way, beside the reference's where there is one; rate in FLOP/s."""
    config, reference = contest.config, results[0] if results[0].name == REFERENCE else None
    tokens = contest.batch_size * config.sequence_len
    figures = []
    for result in results:
        seconds = result.seconds or [result.first["seconds"]]
        line: dict[str, Any] = {
            "reversible": config.reversible,
            "way": result.name,
            "seconds": median(seconds),
            "tokens_per_s": tokens / median(seconds),
            **result.memory,
            **{name: result.first[name] for name in ("peak_bytes", "step_bytes", "loss", "gradient_norm")},
            "loss_difference": relative_difference(result, results[0], "loss"),
            "gradient_norm_difference": relative_difference(result, results[0], "gradient_norm"),
        }
        if reference is not None:
            their_seconds = reference.seconds or [reference.first["seconds"]]
            line["speed_up"] = median(theirs / ours for theirs, ours in zip(their_seconds, seconds, strict=True))
            line["step_less_by"] = reference.first["step_bytes"] / result.first["step_bytes"]
        if rate is not None:
            again = result.name == REFERENCE or contest.plans[result.name].activations_for(config) != "keep"
            line["flop"] = step_flop(config, contest.batch_size, forward_again=again)
            line["matmul_rate_reached"] = line["flop"] / line["seconds"] / rate
        figures.append(line)
    return figures


def table(figures: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of what was measured."""
    columns = [column for column in COLUMNS if column[1] in figures[0]]
    header = ["function", "way", *(title for title, *_ in columns)]
    rows = [
        [
            "reversible" if line["reversible"] else "sequential",
            line["way"],
            *(format(line[name] / unit, form) for _, name, form, unit in columns),
        ]
        for line in figures
    ]
    return header, rows


def step_flop(config: DalleConfig, batch_size: int, *, forward_again: bool) -> float:
    """Multiplications and additions of one forward and backward's matrix products; see the top of this file."""
    width, inner = config.hidden_size, config.num_heads * config.head_size
    weights_a_layer = 4 * width * inner + 3 * config.ffn_multiplier * width**2
    projections = 2 * weights_a_layer * config.sequence_len * config.num_layers
    pairs = {kind: attention_mask(config, kind) for kind in set(config.layer_kinds)}
    length = config.sequence_len
    attention = sum(2 * 2 * inner * int(pairs[kind][:length, :length].sum()) for kind in config.layer_kinds)
    rows = config.text_len * config.num_text_tokens + config.image_len * config.image_vocab_size
    output = 2 * width * rows
    return batch_size * ((3 + forward_again) * (projections + attention) + 3 * output)


def matmul_rate(repeats: int = 20) -> float:
    """The machine's FLOP/s in fp32 matrix products, the median of some."""
    rows, inner, columns = MATMUL_SIZES
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / median(seconds)


if __name__ == "__main__":
    main()
