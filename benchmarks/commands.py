"""The command `dalle-lean bench`: benchmarks that a user may want to rerun, beside the published figures."""

import json
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import echo, warn

OPENING, CLOSING = "<!-- figures:", "-->"
"""The comment in BENCHMARKS.md that holds the JSON line of a published run."""
MEGA = 1e6

Figures = dict[str, float]


class Benchmark(NamedTuple):
    """How to run a benchmark, and which of its figures to compare."""

    module: str
    quick: tuple[str, ...]
    """Arguments of a run of about a minute."""
    figures: Callable[[dict[str, Any]], Figures]
    """Figures of its JSON line, by names that hold the unit."""
    takes_reference: bool = False


def sampling_figures(found: dict[str, Any]) -> Figures:
    figures = {}
    for line in found["drawing"]:
        name = f"batch {line['batch']}, {line['precision']}"
        figures[f"{name}: codes/s"] = line["codes_per_s"]
        figures[f"{name}: pictures/s"] = line["pictures_per_s"]
        figures[f"{name}: share of the bare chain"] = line["of_bare_chain"]
        figures[f"{name}: cache, MB"] = line["cache_bytes"] / MEGA
    for line in found["reference"]:
        figures[f"dalle-pytorch {line['way']}: codes/s"] = line["codes_per_s"]
    return figures


def training_figures(found: dict[str, Any]) -> Figures:
    figures = {}
    for line in found["ways"]:
        name = f"{line['function']}, {line['way']}"
        figures[f"{name}: tokens/s"] = line["tokens_per_s"]
        figures[f"{name}: step, MB"] = line["step_bytes"] / MEGA
    return figures


def memory_figures(found: dict[str, Any]) -> Figures:
    # Lines without bytes are figures published by others.
    measured = [line for line in found.get("layers", ()) if "live_bytes" in line]
    figures = {f"a layer, {line['way']}: widths a token": line["widths"] for line in measured}
    for line in found.get("peaks", ()):
        name = f"{line['function']}, {line['way']}, batch {line['batch_size']}"
        figures[f"{name}: peak, MB"] = line["peak_bytes"] / MEGA
    return figures


def optimizer_figures(found: dict[str, Any]) -> Figures:
    return {f"{name}: M parameters/s": line["parameters_per_s"] / MEGA for name, line in found["optimizers"].items()}


def job_figures(found: dict[str, Any]) -> Figures:
    rates = ("preprocess_pictures_per_s", "train_samples_per_s", "generate_pictures_per_s")
    return {name.replace("_per_", "/").replace("_", " "): found[name] for name in rates if name in found}


BENCHMARKS = {
    "sampling": Benchmark(
        "sampling", ("--batches", "1", "8", "32", "--rounds", "1"), sampling_figures, takes_reference=True
    ),
    "training": Benchmark("training", ("--turns", "1"), training_figures, takes_reference=True),
    "memory": Benchmark("memory", ("--tables", "layers"), memory_figures),
    "optimizer": Benchmark("optimizer", ("--rounds", "2"), optimizer_figures),
    "jobs": Benchmark("speed", (), job_figures),
}
BenchmarkName = StrEnum("BenchmarkName", [(name, name) for name in BENCHMARKS])  # type: ignore[misc]


def bench(
    what: Annotated[
        list[BenchmarkName] | None, typer.Argument(metavar="WHAT", help=f"{', '.join(BenchmarkName)}; all by default.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Run them as published; otherwise each takes about a minute.")
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option(metavar="PYTHON", help="Interpreter with dalle-pytorch 1.6.6, for sampling and training."),
    ] = None,
) -> None:
    """Run benchmarks on this machine and compare with the figures published in BENCHMARKS.md."""
    published = published_figures(published_page().read_text())
    failed = []
    for name in dict.fromkeys(what or BenchmarkName):
        benchmark = BENCHMARKS[name.value]
        arguments = [] if full else [*benchmark.quick]
        if reference is not None and benchmark.takes_reference:
            arguments += ["--reference", reference]
        echo(f"{name}: python -m benchmarks.{' '.join([benchmark.module, *arguments])}")
        found = run(benchmark.module, arguments)
        if found is None:
            failed.append(name)
            warn(f"{name} did not finish; the reason is above")
            continue
        for line in comparison(benchmark.figures, found, published.get(benchmark.module)):
            echo(line)
        echo("")
    if failed:
        raise UserError(f"{len(failed)} of the benchmarks did not finish: {', '.join(failed)}")


def run(module: str, arguments: list[str]) -> dict[str, Any] | None:
    """Run a benchmark in a process of its own and return its JSON line; None if it fails."""
    from benchmarks.child_process import ROOT, RUN_MODULE

    command = [sys.executable, "-c", RUN_MODULE, str(ROOT), f"benchmarks.{module}", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return dict(json.loads(result.stdout.splitlines()[-1])) if result.returncode == 0 else None


def comparison(
    figures_of: Callable[[dict[str, Any]], Figures], found: dict[str, Any], published: dict[str, Any] | None
) -> list[str]:
    """The lines of the report: where the figures come from, then a table of published, here and here / published."""
    here, there = figures_of(found), figures_of(published) if published else {}
    lines = [f"here: {found['machine']}, commit {found['commit']}"]
    if published:
        lines.append(f"published: {published['machine']}, commit {published['commit']}")
        if published["machine"] != found["machine"]:
            lines.append("Another machine: the ratios compare machines as much as versions.")
    else:
        lines.append("published: BENCHMARKS.md has no figures of this benchmark yet")
    width = max(map(len, here))
    lines.append(f"{'figure':{width}} {'published':>12} {'here':>12} {'ratio':>7}")
    for name, value in here.items():
        known = there.get(name)
        ratio = f"{value / known:.2f}" if known else "-"
        lines.append(f"{name:{width}} {number(known):>12} {number(value):>12} {ratio:>7}")
    if missing := there.keys() - here.keys():
        lines.append(f"{len(missing)} published figures were not measured in this run; --full measures more.")
    return lines


def published_page() -> Path:
    """BENCHMARKS.md: beside this package in a checkout, inside it in an installation."""
    here = Path(__file__).resolve().parent
    checkout = here.parent / "BENCHMARKS.md"
    return checkout if checkout.exists() else here / "BENCHMARKS.md"


def published_figures(text: str) -> dict[str, dict[str, Any]]:
    """Benchmark -> its published JSON line; UserError for a comment that holds none, or a benchmark published twice."""
    found: dict[str, dict[str, Any]] = {}
    for part in text.split(OPENING)[1:]:
        line, closing, _ = part.partition(CLOSING)
        try:
            figures = json.loads(line)
            name = figures["benchmark"]
        except (ValueError, TypeError, KeyError):
            figures, name = None, None
        if not closing or not isinstance(name, str):
            raise UserError(
                f"BENCHMARKS.md: {OPENING}{line[:60]}: this is not a comment with the JSON line of a benchmark"
            )
        if name in found:
            raise UserError(f"BENCHMARKS.md: has the figures of {name} twice")
        found[name] = figures
    return found


def number(value: float | None) -> str:
    """A number with at least three digits; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
