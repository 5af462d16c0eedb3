"""Metrics of a run, as lines of JSON and for TensorBoard."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from dalle_lean.io.files import atomic_write
from dalle_lean.require import require

NAME = "metrics.jsonl"


class MetricsLog:
    """OUT/metrics.jsonl, one object per line with its "step", and OUT/tensorboard/.

    Args:
        out: the run's folder; None writes nothing.
        step: the step the run resumes from; later lines, written by a killed process, are removed.
    """

    def __init__(self, out: Path | None, step: int):
        self.file: TextIO | None = None
        self.writer: Any = None
        if out is None:
            return
        path = out / NAME
        kept = [line for line in read_metrics(path) if line["step"] <= step]
        with atomic_write(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        require("tensorboard", extra="training")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **values: float) -> None:
        """Record `values` at `step`, which counts from 1."""
        if self.file is None:
            return
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.writer.close()


class Throughput:
    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.started = time.perf_counter()

    def count(self, **amounts: int) -> None:
        self.done.update(amounts)

    def per_second(self) -> dict[str, float]:
        """Rates since the last call by name, such as "samples_per_s"."""
        now = time.perf_counter()
        rates = {f"{name}_per_s": amount / (now - self.started) for name, amount in self.done.items()}
        self.done, self.started = Counter(), now
        return rates


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics.jsonl, except an incomplete last one."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
