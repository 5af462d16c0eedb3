"""Processes that tests start and press Ctrl+C for."""

import contextlib
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import psutil

PROGRAM = (sys.executable, "-c", "from dalle_lean.cli import main; main()")
"""`dalle-lean`."""


def start(command, **options: Any) -> subprocess.Popen:
    """As Popen, and the process hears Ctrl+C: in the background of a script the tests ignore it, which is inherited."""
    return subprocess.Popen(command, preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL), **options)


def kill_family(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started, and wait for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()
