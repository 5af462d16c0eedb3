"""How every benchmark reports: a table for people, then one JSON line for programs."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A Markdown table, ready for BENCHMARKS.md."""
    for row in (header, ["---"] * len(header), *rows):
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def print_json(name: str, figures: dict[str, Any]) -> None:
    """The last line: the figures and where they were measured."""
    print(json.dumps({"benchmark": name, **figures, "machine": machine(), "commit": commit()}))


def machine() -> str:
    """Processor or GPU, cores and torch's version."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    names = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, torch {torch.__version__}"


def commit() -> str:
    """The checkout's commit, or "unknown" outside one."""
    # An installed package may lie in an environment inside of another repository.
    if not (Path(__file__).parent.parent / ".git").exists():
        return "unknown"
    command = ["git", "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return result.stdout.strip() or "unknown"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
