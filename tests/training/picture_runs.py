"""What tests of runs on pictures share: a run as the commands train it, its metrics, and a run that is killed."""

import os
import pickle
import signal
import subprocess
import sys

import torch

from training.run.graceful_stop import TimeLimit
from training.run.metrics import NAME as METRICS
from training.run.metrics import read_metrics

KILLED = """
import os, pickle, signal, sys

def on_progress(done, total, note):
    if note.startswith(f"step {step}/"):
        os.kill(os.getpid(), signal.SIGKILL)

step, (run_class, *arguments), inputs = pickle.load(sys.stdin.buffer)
run_class(*arguments, on_progress=on_progress, **inputs).run(on_progress)
"""


def train_on_pictures(run_class, *arguments, max_minutes=None, on_progress=None, **inputs):
    """Train until the run or the time, reading included, is over; returns the progress."""
    limit = TimeLimit(max_minutes)
    return run_class(*arguments, on_progress=on_progress, **inputs).run(on_progress, limit)


def metrics(out):
    """The lines of a run's metrics, without what depends on the clock."""
    lines = read_metrics(out / METRICS)
    return [{name: value for name, value in line.items() if name != "pictures_per_s"} for line in lines]


def killed_after(step, *arguments, **inputs):
    """Train in another process, which is killed with signal 9 after this step."""
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    content = pickle.dumps((step, arguments, inputs))
    done = subprocess.run([sys.executable, "-c", KILLED], input=content, env={**os.environ, **threads})
    assert done.returncode == -signal.SIGKILL


def cut_after(step, clock, *arguments, **inputs):
    """Train for a minute that is over after this step; returns the progress."""

    def on_progress(done, total, note):
        if note.startswith(f"step {step}/"):
            clock.advance(61)

    return train_on_pictures(*arguments, max_minutes=1, on_progress=on_progress, **inputs)
