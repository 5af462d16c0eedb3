"""Exact bytes of tensors on the CPU: what a function allocates, what it leaves, what it keeps for backward.

torch's profiler sees every allocation and release of a tensor's memory, even inside kernels, but not what the matrix
library allocates for itself.
"""

import gc
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
    """Left after forward, including its result."""
    peak_bytes: int
    """The most at any moment of forward and backward."""


def step_bytes(loss: Callable[[], Tensor], parameters: Iterable[nn.Parameter]) -> Step:
    """Bytes of loss() and its backward, which adds to existing gradients."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    forward_peak, kept, value = allocated(loss)
    backward_peak, _, _ = allocated(value.backward)
    return Step(kept, max(forward_peak, kept + backward_peak))


def allocated(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that run() allocates and has not released yet, at the peak and at its end; and its result."""
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with without_garbage_collection():
        with silent_stderr():
            recording.start()
        result = run()
        with silent_stderr():
            recording.stop()
    live = peak = 0
    for nbytes in memory_events(recording):
        live += nbytes
        peak = max(peak, live)
    return peak, live, result


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect nothing: the release of an earlier function's garbage would be counted. To collect it first would take
    half a second each time in a large process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def memory_events(recording: Any) -> list[int]:
    """Bytes allocated (negative: released), in order, which the profiler's public events do not tell."""
    events = [event for event in recording.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Discard standard error, on which the profiler's library announces itself whatever its log level."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
