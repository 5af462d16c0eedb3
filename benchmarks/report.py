"""How every benchmark reports: a table for people, then one JSON line for programs."""

import json
import math
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


def share(hits: int, of: int) -> str:
    """A share in percent with its 95 % confidence interval (Wilson 1927)."""
    if of == 0:
        return "no prompts"
    low, high = wilson(hits, of)
    return f"{100 * hits / of:.0f} % ({hits}/{of}; {100 * low:.0f} to {100 * high:.0f})"


def wilson(hits: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share."""
    p = hits / of
    centre = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of)) / (1 + z * z / of)
    return max(0.0, centre - half), min(1.0, centre + half)


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
