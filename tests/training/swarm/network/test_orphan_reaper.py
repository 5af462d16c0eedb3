"""Everything that a process has started ends with it, and nothing else does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.training.swarm.harness import wait_for
from tests.training.swarm.nursery import is_alive, send
from training.swarm.network.orphan_reaper import carries

CODE = """
import os, signal, subprocess, sys, time
from training.swarm.network.orphan_reaper import guard_children
if os.environ.get("GUARDED"):
    guard_children()
    time.sleep(1)
if (fork := os.fork()) == 0:
    time.sleep(60)
    os._exit(0)
other = subprocess.Popen(["sleep", "60"], start_new_session=bool(os.environ.get("GUARDED")))
print(fork, other.pid, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def orphans(**environment):
    """The fork and the program that a process started just before it was killed, and the fork's command."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CODE], env={**os.environ, **environment}, **pipes) as process:
        found = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        command = found[0].cmdline()
        process.stdin.close()
        assert process.wait(30) == -signal.SIGKILL
    return found, command


@pytest.fixture
def sibling():
    """Orphans of the same session with the same command line, of a process without a guard."""
    found, command = orphans()
    yield found, command
    for process in found:
        send(process.pid, signal.SIGKILL)


def test_what_was_started_in_the_last_moment_ends_and_what_a_sibling_started_lives(sibling):
    unguarded, its_command = sibling
    started, command = orphans(GUARDED="1")
    assert command == its_command
    later, _ = orphans()
    try:
        wait_for(lambda: not any(is_alive(process) for process in started), 30, "the end of what was started")
        time.sleep(0.5)
        assert all(is_alive(process) for process in [*unguarded, *later])
    finally:
        for process in later:
            send(process.pid, signal.SIGKILL)


def test_a_process_that_closes_a_file_meanwhile_is_known_by_the_others(monkeypatch):
    readlink, looks = os.readlink, []

    def readlink_of_one_that_closes(file):
        looks.append(file)
        if len(looks) == 1:
            raise FileNotFoundError(file)
        return readlink(file)

    monkeypatch.setattr(os, "readlink", readlink_of_one_that_closes)
    marker = os.memfd_create("dalle-lean-marker")
    try:
        assert carries(psutil.Process(), "dalle-lean-marker")
    finally:
        os.close(marker)
    assert not carries(psutil.Process(), "dalle-lean-marker")
