"""What tests of runs on pictures share: their metrics, and a run that is killed."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import torch

KILLED = """
import importlib, json, os, signal, sys
from pathlib import Path

def on_progress(done, total, note):
    if note.startswith("step 5/"):
        os.kill(os.getpid(), signal.SIGKILL)

train_module, train, recipe_module, recipe, data, out, fields = sys.argv[1:]
recipe = getattr(importlib.import_module(recipe_module), recipe)(**json.loads(fields))
getattr(importlib.import_module(train_module), train)(Path(data), Path(out), recipe, on_progress=on_progress)
"""


def metrics(out):
    """The lines of a run's metrics, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "pictures_per_s"} for line in lines]


def kill_after_step_5(train, data, out, recipe):
    """Call `train` in another process, which is killed with signal 9 after its fifth step."""
    names = [train.__module__, train.__name__, type(recipe).__module__, type(recipe).__name__]
    command = [sys.executable, "-c", KILLED, *names, str(data), str(out), json.dumps(asdict(recipe))]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    assert subprocess.run(command, env={**os.environ, **threads}).returncode == -signal.SIGKILL
