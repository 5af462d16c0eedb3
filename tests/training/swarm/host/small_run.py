"""Creates a small run on loopback, and waits for it."""

import time

import pytest

from dalle_lean.cli import main
from training.run.recipe import load_recipe
from training.swarm.config import TimingSection
from training.swarm.host.run_setup import HostOptions, make_run

TIMING = TimingSection(
    matchmaking_time_s=2,
    request_timeout_s=1,
    averaging_timeout_s=20,
    next_chunk_timeout_s=5,
    load_state_timeout_s=30,
    progress_expiration_s=20,
)
ON_LOOPBACK = HostOptions(port=0, announce="127.0.0.1", listen="127.0.0.1")
PATIENCE_S = 240.0


def make(run_dir, shards, *, batch_size=32, steps=100, options=ON_LOOPBACK, **others):
    recipe = load_recipe("tiny").override(steps=steps, batch_size=batch_size)
    settings = make_run(run_dir, str(shards), recipe, timing=TIMING, options=options, on_notice=print, **others)
    (run_dir / ".run.lock").touch()
    return settings


def until(what, condition, patience_s=PATIENCE_S):
    """Wait until the condition holds; AssertionError after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.3)
    raise AssertionError(f"{what} did not come about in {patience_s:.0f} s")


def run_program(*arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code
