"""Models in processes of their own that take turns: a measurement on request, its figures back.

A child reads its task as JSON from its command line and answers every line of its standard input, a request in JSON,
with a line of JSON. It imports this file, so nothing but torch and the standard library is imported here.

`serve` is the child that trains. Its memory is what Linux counts as resident, in bytes:

- base: the process after its imports and one step of a tiny model: code, libraries, threads.
- weights and gradients: by arithmetic, the parameters that are trained. The gradients exist before the step, which
  adds to them, as in gradient accumulation.
- peak: the most that was resident during the child's first step, base, weights and gradients included.
- step: what that step added, the peak less what was resident right before it; free memory was given back to the
  system until then. It holds activations, temporaries and what the allocator and the matrix library keep.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from dalle_lean.errors import UserError

ROOT = Path(__file__).parent.parent
# The interpreter's own packages come first, also where this package lies among another interpreter's; those of the
# current folder, "", never: -P would do for Python 3.11 and later, but a reference may need an earlier one.
RUN_MODULE = (
    "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv.pop(1)]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class Subject(NamedTuple):
    """A model and its batch, ready for a step."""

    parameters: list[nn.Parameter]
    loss: Callable[[], Tensor]


def serve(build: Callable[[dict[str, Any]], Subject]) -> None:
    """The child: `build` makes a Subject of the task's "model" and, to warm up, of its "tiny" model."""
    if not CLEAR_REFS.exists():
        raise UserError("peak memory is read from /proc, which only Linux has")
    task, answer = open_task()
    build(task["tiny"]).loss().backward()
    base_bytes = settled_bytes()
    subject = build(task["model"])
    for parameter in subject.parameters:
        # Written once, so that its pages are resident before the first step.
        parameter.grad = torch.ones_like(parameter)
    weight_bytes = sum(p.numel() * p.element_size() for p in subject.parameters)
    answer({"base_bytes": base_bytes, "weight_bytes": weight_bytes})
    for count, _ in enumerate(requests()):
        answer(step(subject, first=count == 0))


def open_task() -> tuple[dict[str, Any], Callable[[dict[str, Any]], None]]:
    """A child's task, its threads set, and how it answers."""
    # Libraries that print must not spoil the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    task = json.loads(sys.argv[1])
    torch.set_num_threads(task["threads"])
    return task, lambda figures: print(json.dumps(figures), file=answers, flush=True)


def requests() -> Iterator[Any]:
    """What a child is asked, until its parent is done."""
    return (json.loads(line) for line in sys.stdin)


def step(subject: Subject, *, first: bool) -> dict[str, float]:
    """One forward and backward; of the first one the memory and the gradients' norm too."""
    for parameter in subject.parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()
    before_bytes = settled_bytes() if first else 0
    started = time.perf_counter()
    loss = subject.loss()
    loss.backward()
    figures = {"seconds": time.perf_counter() - started, "loss": loss.item()}
    if first:
        peak_bytes = status_bytes("VmHWM")
        gradients = [p.grad for p in subject.parameters if p.grad is not None]
        norm = torch.stack([gradient.norm().double() for gradient in gradients]).norm().item()
        figures |= {"peak_bytes": peak_bytes, "step_bytes": peak_bytes - before_bytes, "gradient_norm": norm}
    return figures


def settled_bytes() -> int:
    """What is resident after free memory went back to the system; the peak is counted from here on."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    CLEAR_REFS.write_text(RESET_PEAK)
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A size in the kernel's table of this process."""
    return next(1024 * int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))


class Child:
    """The parent's end of one child, that module of this package run by that interpreter; a context manager."""

    def __init__(self, python: str, module: str, task: dict[str, Any]):
        threads = str(task["threads"])
        self.name = f"{module} in {python}"
        self.process = subprocess.Popen(
            [os.path.abspath(python), "-c", RUN_MODULE, str(ROOT), module, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def answer(self) -> dict[str, Any]:
        """The next line of the child; the first one comes unasked."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"{self.name} ended before it answered; it says why above")
        return dict(json.loads(line))

    def ask(self, request: Any = None) -> dict[str, Any]:
        """The answer to a request; a child that trains takes none."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()
