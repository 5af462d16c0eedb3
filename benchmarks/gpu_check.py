"""Does everything work on this GPU, and how fast? `make gpu-check`, under ten minutes, without a network.

Each part runs in a process of its own, so that a part that fails or hangs does not affect the others:

- tests: those marked gpu.
- train small, train paper: steps with LAMB in bf16 on random samples, with fused attention and otherwise the fastest
  plan that fits: tokens/s; MFU, the arithmetic of one forward and backward (nothing recomputed;
  dalle_lean/memory/flops.py) over their time without LAMB and over the rate of a large bf16 product, measured in the
  same process; peak bytes on the device, predicted and measured; the share of a step during which the GPU computes, and
  its slowest kernels.
- draw small, draw paper: from a prompt to the PNG files of the best 4 of 128, with random weights; the second drawing,
  after the warm-up.
- recipe: two minutes of the bundled model's recipe on random samples: samples/s, and whether the loss falls.

The last line is one JSON object. It has the last line of error of each part that fails; the exit code is then 1.
`--device cpu --small` tries all of this on a CPU in a minute.
"""

import dataclasses
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.child_process import ROOT
from benchmarks.reference import SMALL, random_batch
from benchmarks.report import Column, make_parser, print_figures, print_json
from benchmarks.roofline import matmul_rate
from benchmarks.timing import now
from dalle_lean import Dalle, DalleConfig
from dalle_lean.devices import pick_device
from dalle_lean.free_memory import free_bytes
from dalle_lean.images.vqgan import VQGAN, VQGANConfig
from dalle_lean.io.model_folder import bundled_model, load_model
from dalle_lean.memory import TrainingSetup, cost_of, fastest_plan
from dalle_lean.memory.flops import forward_flop
from inference import Generator
from training.data.loader import Batch
from training.run.recipe import DataRecipe, MemoryRecipe, Recipe, load_recipe
from training.step.learner import Learner

MODELS = {"small": SMALL, "paper": DalleConfig.paper()}
TINY = {"hidden_size": 48, "num_layers": 4, "num_heads": 2, "head_size": 16, "text_len": 8, "image_side": 8}
BATCHES = {"small": 256, "paper": 32}
LARGE_PRODUCT = (8192, 8192, 8192)
LIMITS_S = {
    "tests": 150,
    "train small": 60,
    "train paper": 80,
    "draw small": 40,
    "draw paper": 80,
    "recipe": 145,
}
"""Seconds after which a part is killed; together under ten minutes."""
COLUMNS = (
    Column("part", "part"),
    Column("seconds", "seconds", ",.1f"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("MFU", "mfu", ".1%"),
    Column("GPU busy", "busy", ".0%"),
    Column("peak, GB", "peak_bytes", ".2f", 1e9),
    Column("predicted, GB", "predicted_bytes", ".2f", 1e9),
    Column("best of 128, s", "drawing_s", ".1f"),
    Column("samples/s", "samples_per_s", ",.1f"),
    Column("outcome", "outcome"),
)


def main() -> None:
    """Run the parts, print the table and the JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="tiny models and few steps, to try the check itself")
    parser.add_argument("--parts", nargs="*", choices=LIMITS_S, default=list(LIMITS_S), help="only these")
    parser.add_argument("--child", choices=LIMITS_S, help="run one part in this process")
    options = parser.parse_args()
    try:
        device = pick_device(options.device)
        if options.child:
            print(json.dumps(part(options.child, device, options.small)))
            return
    except ValueError as mistake:
        parser.error(str(mistake))
    lines = [run_part(name, options.device, options.small) for name in options.parts]
    print_figures(lines, COLUMNS)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    print_json("gpu_check", {"device": str(device), "gpu": gpu, "torch": torch.__version__, "parts": lines})
    sys.exit(any(line["outcome"] != "ok" for line in lines))


def run_part(name: str, device: str, small: bool) -> dict[str, Any]:
    """Run a part in a process of its own: its figures, or its last line of error."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--child", name, "--device", device]
    started = time.perf_counter()
    child = subprocess.Popen(
        [*command, *(["--small"] if small else [])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = child.communicate(timeout=LIMITS_S[name])
        last = (errors.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        outcome = "ok" if child.returncode == 0 else last
        figures = json.loads(said.splitlines()[-1]) if child.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        outcome, figures = f"ended after {LIMITS_S[name]} s", {}
    finally:
        # What it has started too, which would take time and memory of the next part.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return {"part": name, "outcome": outcome, "seconds": time.perf_counter() - started, **figures}


def part(name: str, device: torch.device, small: bool) -> dict[str, Any]:
    """The figures of one part."""
    torch.manual_seed(0)
    kind, _, model = name.partition(" ")
    if kind == "tests":
        return marked_tests()
    if kind == "recipe":
        return follow_recipe(device, seconds=2.0 if small else 120.0)
    config = dataclasses.replace(MODELS[model], **TINY) if small else MODELS[model]
    if kind == "train":
        batch_size, seconds = (2, 0.5) if small else (BATCHES[model], 20.0)
        return train(config, device, batch_size=batch_size, seconds=seconds)
    return draw(config, device, pictures=4 if small else 128)


def marked_tests() -> dict[str, Any]:
    """Run the tests marked gpu; RuntimeError if one fails."""
    # Collecting the other files would take a third of the part's time.
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    closing = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    if done.returncode != 0:
        raise RuntimeError(f"tests: {closing}")
    return {"tests": closing}


def train(config: DalleConfig, device: torch.device, *, batch_size: int, seconds: float) -> dict[str, Any]:
    """Time steps with LAMB, and forward and backward alone, under the fastest plan that fits into 80 % of the free
    memory."""
    setup = TrainingSetup.of_precision("bf16", batch=batch_size, device=device.type)
    plan = fastest_plan(config, setup, 0.8 * free_bytes(device), fused_attention=True)
    memory = MemoryRecipe(**dataclasses.asdict(plan), precision="bf16")
    recipe = Recipe(model=config.to_dict(), memory=memory, data=DataRecipe(batch_size=batch_size))
    learner = Learner(Dalle(config, device=device), recipe)
    batch = Batch(**random_batch(config, batch_size))
    gradient = learner.accumulate_gradient
    gradient(batch)
    figures: dict[str, Any] = {"plan": str(plan), "batch": batch_size}
    if device.type == "cuda":
        learner.optimizer.step()
        torch.cuda.reset_peak_memory_stats(device)
        gradient(batch)
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        figures["predicted_bytes"] = cost_of(config, learner.memory, setup).peak_bytes
    gradient_s, _ = repeated(lambda: gradient(batch), device, seconds / 2)
    step_s, _ = repeated(lambda: learner.step(batch, lr=1e-4), device, seconds / 2)
    if device.type == "cuda":
        figures |= kernel_times(lambda: learner.step(batch, lr=1e-4), step_s)
    sizes = LARGE_PRODUCT if device.type == "cuda" else (512, 512, 512)
    rate = matmul_rate("bf16", device, sizes=sizes)
    flop = 3 * forward_flop(config, batch_size).total
    return {
        **figures,
        "step_s": step_s,
        "tokens_per_s": batch_size * config.sequence_len / step_s,
        "gradient_s": gradient_s,
        "flop_per_s": flop / gradient_s,
        "matmul_flop_per_s": rate,
        "mfu": flop / gradient_s / rate,
    }


def kernel_times(run: Callable[[], Any], run_s: float) -> dict[str, Any]:
    """The share of `run_s` during which kernels of one run() compute, and the ten that take longest, in seconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        run()
        torch.cuda.synchronize()
    kernels = {event.key[:80]: event.self_device_time_total / 1e6 for event in recording.key_averages()}
    slowest = sorted(kernels.items(), key=lambda kernel: -kernel[1])[:10]
    return {"busy": sum(kernels.values()) / run_s, "kernels_s": dict(slowest)}


def draw(config: DalleConfig, device: torch.device, *, pictures: int) -> dict[str, Any]:
    """Seconds from a prompt to PNG files, the first and the second time."""
    bundled = Generator.from_folder(bundled_model(), device=device)
    model = Dalle(config, device=device).eval()
    vqgan = VQGAN(VQGANConfig(codebook_size=config.image_vocab_size)).eval().to(device)
    precision = "bf16" if device.type == "cuda" else "fp32"
    generator = Generator(model, bundled.tokenizer, vqgan, bundled.scorer, precision)
    figures = {}
    for count in ("first_drawing_s", "drawing_s"):
        started = now(device)
        for picture in generator("a red heart", num_images=pictures, best=4):
            picture.image.save(io.BytesIO(), "png")
        figures[count] = now(device) - started
    return {**figures, "pictures": pictures}


def follow_recipe(device: torch.device, *, seconds: float) -> dict[str, Any]:
    """Train with the bundled model's recipe; RuntimeError unless the loss falls."""
    recipe = load_recipe("emoji128")
    config = load_model(bundled_model()).config
    learner = Learner(Dalle(config, device=device), recipe)
    batch = Batch(**random_batch(config, recipe.data.batch_size))
    losses: list[float] = []
    step_s, steps = repeated(lambda: losses.append(learner.step(batch, 1e-3).loss), device, seconds)
    if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):
        raise RuntimeError(f"recipe: the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps")
    return {"samples_per_s": recipe.data.batch_size / step_s, "steps": steps, "losses": [losses[0], losses[-1]]}


def repeated(run: Callable[[], Any], device: torch.device, seconds: float) -> tuple[float, int]:
    """Mean seconds of a run, and the number of runs, without the first, which is the warm-up."""
    run()
    started, count = now(device), 0
    while count < 2 or now(device) - started < seconds:
        run()
        count += 1
    return (now(device) - started) / count, count


if __name__ == "__main__":
    main()
