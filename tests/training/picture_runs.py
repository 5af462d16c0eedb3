"""What tests of runs on pictures share: their metrics, and a run that is killed."""

import multiprocessing
import os
import signal

import torch

from training.run.loop import train_on_pictures
from training.run.metrics import NAME as METRICS
from training.run.metrics import read_metrics


def metrics(out):
    """The lines of a run's metrics, without what depends on the clock."""
    lines = read_metrics(out / METRICS)
    return [{name: value for name, value in line.items() if name != "pictures_per_s"} for line in lines]


def killed_after(step, *arguments, **inputs):
    """Train in another process, which is killed with signal 9 after this step."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=train_and_die, args=(step, torch.get_num_threads(), arguments, inputs))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def train_and_die(step, threads, arguments, inputs):
    def on_progress(done, total, note):
        if note.startswith(f"step {step}/"):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(threads)
    train_on_pictures(*arguments, on_progress=on_progress, **inputs)


def cut_after(step, clock, *arguments, **inputs):
    """Train for a minute that is over after this step; returns the progress."""

    def on_progress(done, total, note):
        if note.startswith(f"step {step}/"):
            clock.advance(61)

    return train_on_pictures(*arguments, max_minutes=1, on_progress=on_progress, **inputs)
