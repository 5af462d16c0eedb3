"""The report of every benchmark: tables for people, then one JSON line for programs."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.child_process import ROOT

TEST_PICTURES = ROOT / "tests" / "data" / "emoji"


class Column(NamedTuple):
    """How a table shows one figure."""

    title: str
    name: str
    form: str = ""
    """A format specification."""
    unit: float = 1
    """Divides the figure."""

    def cell(self, line: Mapping[str, Any]) -> str:
        """A line's figure; "-" if it has none."""
        if self.name not in line:
            return "-"
        value = line[self.name]
        return format(value if self.unit == 1 else value / self.unit, self.form)


def print_figures(lines: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> None:
    """Print a table of figures, without columns that no line has."""
    shown = [column for column in columns if any(column.name in line for line in lines)]
    print_table([column.title for column in shown], [[column.cell(line) for column in shown] for line in lines])


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table, ready for BENCHMARKS.md."""
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def print_json(name: str, figures: dict[str, Any]) -> None:
    """Print the last line: the figures, the machine and the commit."""
    print(json.dumps({"benchmark": name, **figures, "machine": machine(), "commit": commit()}))


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows a module's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def check_positive(parser: argparse.ArgumentParser, **values: int) -> None:
    """Exit with one line and code 2 if an option is below 1."""
    for name, value in values.items():
        if value < 1:
            parser.error(f"--{name} {value}: must be at least 1")


def machine() -> str:
    """Processor and cores, a GPU if there is one, and torch's version."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores{gpu}, torch {torch.__version__}"


def commit() -> str:
    """The checkout's commit, or "unknown" outside one."""
    # An installed package may lie in an environment inside another repository.
    if not (ROOT / ".git").exists():
        return "unknown"
    command = ["git", "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return result.stdout.strip() or "unknown"
