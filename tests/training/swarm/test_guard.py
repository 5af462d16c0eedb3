"""What a process has started ends with it, and nothing else does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.training.swarm.harness import wait_for
from tests.training.swarm.nursery import send

CODE = """
import os, signal, subprocess, sys, time
from training.swarm.guard import guard_children
if os.environ.get("GUARDED"):
    guard_children()
    time.sleep(1)
if (fork := os.fork()) == 0:
    time.sleep(60)
    os._exit(0)
other = subprocess.Popen(["sleep", "60"], start_new_session=bool(os.environ.get("GUARDED")))
print(fork, other.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def orphans(**environment):
    """The fork and the program that a process started in the moment before it was killed."""
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE) as process:
        found = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert process.wait(30) == -signal.SIGKILL
    return found


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture
def sibling():
    """Orphans of the same session whose command line is the same, of a process that had no guard."""
    found = orphans()
    yield found
    for process in found:
        send(process.pid, signal.SIGKILL)


def test_what_was_started_in_the_last_moment_ends_and_what_a_sibling_started_lives(sibling):
    started = orphans(GUARDED="1")
    assert started[0].cmdline() == sibling[0].cmdline()
    later = orphans()
    try:
        wait_for(lambda: not any(is_alive(process) for process in started), 5, "the end of what was started")
        time.sleep(0.5)
        assert all(is_alive(process) for process in [*sibling, *later])
    finally:
        for process in later:
            send(process.pid, signal.SIGKILL)
