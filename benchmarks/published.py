"""The figures of BENCHMARKS.md, which keeps the JSON line of a published run in a comment:

<!-- figures: {"benchmark": "sampling", ...} -->
"""

import json
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError

OPENING, CLOSING = "<!-- figures:", "-->"


def published_page() -> Path:
    """BENCHMARKS.md beside this package in a checkout, inside it where it is installed."""
    here = Path(__file__).resolve().parent
    checkout = here.parent / "BENCHMARKS.md"
    return checkout if checkout.exists() else here / "BENCHMARKS.md"


def published_figures(text: str) -> dict[str, dict[str, Any]]:
    """Benchmark -> its published JSON line; ValueError names a comment that is none, or comes twice."""
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
                f"BENCHMARKS.md: {OPENING}{line[:60]}: this is no comment with the JSON line of a benchmark"
            )
        if name in found:
            raise UserError(f"BENCHMARKS.md: the figures of {name} come twice")
        found[name] = figures
    return found
