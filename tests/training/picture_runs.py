"""What tests of runs on pictures share: their metrics, and a run that is killed."""

import os
import pickle
import signal
import subprocess
import sys

import torch

from training.run.loop import train_on_pictures
from training.run.metrics import NAME as METRICS
from training.run.metrics import read_metrics

KILLED = """
import os, pickle, signal, sys
from training.run.loop import train_on_pictures

def on_progress(done, total, note):
    if note.startswith(f"step {step}/"):
        os.kill(os.getpid(), signal.SIGKILL)

step, arguments, inputs = pickle.load(sys.stdin.buffer)
train_on_pictures(*arguments, on_progress=on_progress, **inputs)
"""


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
