"""Exact bytes of tensors on the CPU: what a function allocates, what it leaves, what it keeps for backward.

torch's profiler sees every allocation and release of a tensor's memory, inside of kernels too; it does not see what the
matrix library takes for itself.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


class Step(NamedTuple):
    """Bytes of one forward and backward above what existed before."""

    kept_bytes: int
    """What forward leaves, its result included."""
    peak_bytes: int
    """The most at any moment of the two."""


def step_bytes(loss: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> Step:
    """Bytes of loss() and its backward, which adds to gradients that exist before."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    forward_peak, kept, value = allocated(loss)
    backward_peak, _, _ = allocated(value.backward)
    return Step(kept, max(forward_peak, kept + backward_peak))


def allocated(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that run() has allocated and not released, (the most, at its end); and its result."""
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with nothing_on_stderr():
        recording.start()
    result = run()
    with nothing_on_stderr():
        recording.stop()
    live = peak = 0
    for nbytes in memory_events(recording):
        live += nbytes
        peak = max(peak, live)
    return peak, live, result


def memory_events(recording: Any) -> list[int]:
    """Bytes allocated, negative where released, in order; the profiler's public events tell no order."""
    events = [event for event in recording.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@contextmanager
def nothing_on_stderr() -> Iterator[None]:
    """The profiler's library announces itself there whatever its log level is."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
