"""A child that trains a model and measures its memory: the bytes that Linux counts as resident.

- base: the process after its imports and one step of a tiny model: code, libraries, threads.
- weights and gradients: by arithmetic, from the trained parameters. The gradients exist before the step, which adds to
  them, as in gradient accumulation.
- peak: the most during the child's first step, including base, weights and gradients.
- step: what that step added: the peak less what was resident right before it, after free memory had been returned to
  the system. It holds activations, temporaries and what the allocator and the matrix library keep.

Like child_process.py, it imports little but torch and the standard library.
"""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.child_process import open_task, requests
from dalle_lean.errors import UserError

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class Workload(NamedTuple):
    """A model and its batch, ready for a step."""

    parameters: list[nn.Parameter]
    loss: Callable[[], Tensor]


def serve(build: Callable[[dict[str, Any]], Workload]) -> None:
    """Train what `build` makes of the task's "model", after a warm-up step of its "tiny" model."""
    if not CLEAR_REFS.exists():
        raise UserError("peak memory is read from /proc, which only Linux has")
    task, answer = open_task()
    build(task["tiny"]).loss().backward()
    base_bytes = settled_bytes()
    workload = build(task["model"])
    for parameter in workload.parameters:
        # Written, so that its pages are resident before the first step.
        parameter.grad = torch.ones_like(parameter)
    weight_bytes = sum(p.numel() * p.element_size() for p in workload.parameters)
    answer({"base_bytes": base_bytes, "weight_bytes": weight_bytes})
    for count, _ in enumerate(requests()):
        answer(step(workload, first=count == 0))


def step(workload: Workload, *, first: bool) -> dict[str, float]:
    """One forward and backward; the first one also measures memory and the gradients' norm."""
    gradients = [parameter.grad for parameter in workload.parameters if parameter.grad is not None]
    for gradient in gradients:
        gradient.zero_()
    before_bytes = settled_bytes() if first else 0
    started = time.perf_counter()
    loss = workload.loss()
    loss.backward()
    figures = {"seconds": time.perf_counter() - started, "loss": loss.item()}
    if first:
        peak_bytes = status_bytes("VmHWM")
        norm = torch.stack([gradient.norm().double() for gradient in gradients]).norm().item()
        figures |= {"peak_bytes": peak_bytes, "step_bytes": peak_bytes - before_bytes, "gradient_norm": norm}
    return figures


def settled_bytes() -> int:
    """The resident bytes after returning free memory to the system; resets the peak."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    CLEAR_REFS.write_text(RESET_PEAK)
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A size in the kernel's status of this process, in bytes."""
    return next(1024 * int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))
