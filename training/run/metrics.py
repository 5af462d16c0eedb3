"""What a run measures on the way: lines of JSON for programs, TensorBoard for eyes."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self, TextIO

from dalle_lean.io.files import atomic_write
from dalle_lean.require import require

NAME = "metrics.jsonl"


class MetricsLog:
    """OUT/metrics.jsonl, one object per line with its "step", and OUT/tensorboard/.

    Args:
        out: the run's folder; None: nothing is written.
        step: the step the run resumes from; what an earlier, killed process wrote beyond it is removed.
    """

    def __init__(self, out: Path | None, step: int):
        self.file: TextIO | None = None
        self.writer: Any = None
        if out is None:
            return
        self.path = out / NAME
        keep_until(self.path, step)
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        tensorboard = require("torch.utils.tensorboard", extra="training")
        self.writer = tensorboard.SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **values: float) -> None:
        """Record `values` at `step` (1 is the first)."""
        if self.file is None:
            return
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is still held back."""
        if self.file is not None:
            self.file.close()
            self.writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Throughput:
    """How much is done per second."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.started = time.perf_counter()

    def count(self, **amounts: int) -> None:
        """Add to what was done."""
        self.done.update(amounts)

    def per_second(self) -> dict[str, float]:
        """The rates by name, such as "samples_per_s", since the last call."""
        now = time.perf_counter()
        rates = {f"{name}_per_s": amount / (now - self.started) for name, amount in self.done.items()}
        self.done, self.started = Counter(), now
        return rates


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def keep_until(path: Path, step: int) -> None:
    """Remove the lines after `step`."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    with atomic_write(path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
