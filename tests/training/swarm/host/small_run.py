"""Creates a small run on loopback, hosts it with real processes, and waits for it."""

import signal
import subprocess
import time

import pytest

from dalle_lean.cli import main
from tests.children import PROGRAM, kill_family, start
from training.run.recipe import load_recipe
from training.swarm.config import TimingSection, read_settings
from training.swarm.host.run_setup import make_run
from training.swarm.host.status import read_status

TIMING = TimingSection(
    matchmaking_time_s=2,
    request_timeout_s=1,
    averaging_timeout_s=20,
    next_chunk_timeout_s=5,
    load_state_timeout_s=30,
    progress_expiration_s=20,
)
ON_LOOPBACK = {"port": 0, "announce": "127.0.0.1", "listen": "127.0.0.1"}
PATIENCE_S = 240.0


def make(run_dir, shards, *, batch_size=32, steps=100, **options):
    recipe = load_recipe("tiny").override(steps=steps, batch_size=batch_size)
    settings = make_run(run_dir, str(shards), recipe, timing=TIMING, on_notice=print, **ON_LOOPBACK | options)
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


class Hosted:
    """A run that `dalle-lean host` keeps alive, and a trainer of it."""

    def __init__(self, run_dir, *options):
        self.run_dir = run_dir
        self.started = []
        self.output = run_dir.parent / "host.out"
        self.host = self.start("host", str(run_dir), *options, output=self.output)

    def start(self, *arguments, output):
        with open(output, "ab") as file:
            process = start(
                [*PROGRAM, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self.started.append(process)
        return process

    def train(self, name, *reached):
        """Start a trainer; `reached` are the options of one that listens."""
        addresses = read_settings(self.run_dir).swarm.addresses
        options = (*(reached or ["--client"]), "--batch-size", "8", "--folder", str(self.run_dir.parent / name))
        return self.start("join", *addresses, *options, output=self.run_dir.parent / f"{name}.out")

    def stop(self):
        """End the trainers, then the host as Ctrl+C does."""
        for trainer in self.started[1:]:
            kill_family(trainer)
        self.host.send_signal(signal.SIGINT)
        assert self.host.wait(PATIENCE_S) == 130

    def status(self, name):
        return read_status(self.run_dir, name)

    def step(self):
        return self.status("donor-0").get("step") or 0

    def said(self, words):
        return words in self.output.read_text()

    def report(self):
        for path in [*self.run_dir.parent.glob("*.out"), *self.run_dir.glob("logs/*.log")]:
            print(f"== {path}\n{path.read_text(errors='replace')[-3000:]}")

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is not None:
            self.report()
        for process in self.started:
            kill_family(process)
