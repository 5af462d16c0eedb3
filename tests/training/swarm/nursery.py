"""Imports what peers need once, then forks one for each line on stdin: seconds of importing become milliseconds.

A line is JSON, the specification of `member.live`; the answer is the new process' id. It leads a session of its own,
by which all that it starts can be found. At the line "end", or when stdin ends, everything ends.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import traceback
from pathlib import Path

import psutil

CLONE_NEWNET = 0x40000000
ROOT = Path(__file__).parents[3]
DIE = "die"
"""File in a member's folder that names the stage in which the member is to be killed."""


def main() -> None:
    """Serve requests until stdin ends."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    from tests.training.swarm import member

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    born = []
    for line in sys.stdin:
        if line == "end\n":
            break
        spec = json.loads(line)
        pid = os.fork()
        if pid:
            born.append(pid)
            print(pid, flush=True)
            continue
        code = 1
        try:
            be_born(spec)
            own_locks()
            random.seed()  # else all members would draw the same ids
            np.random.seed(random.getrandbits(32))  # noqa: NPY002
            member.live(spec)
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    for pid in born:
        for process in processes_of(pid):
            send(process.pid, signal.SIGKILL)
    os._exit(0)  # skips the exit handlers of multiprocessing and torch


def processes_of(session: int) -> list[psutil.Process]:
    """All processes of a session."""
    return [process for process in psutil.process_iter() if session_of(process.pid) == session]


def is_alive(process: psutil.Process) -> bool:
    """Whether the process has not ended yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def session_of(pid: int) -> int:
    """The session of a process; 0 if the process is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def be_born(spec: dict) -> None:
    """Give a member its own session, output and network namespace, and the default signal handlers."""
    os.setsid()
    output = os.open(Path(spec["folder"]) / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in enumerate((nothing, output, output)):
        os.dup2(target, number)
    os.closerange(3, 64)  # closes the nursery's pipes, so that it notices the end of its stdin
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=True)
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if spec.get("namespace"):
        enter_namespace(spec["namespace"])


def own_locks() -> None:
    """Renew hivemind's import-time locks: a member killed with one would block all others."""
    from hivemind.utils.asyncio import _AsyncContextWrapper
    from hivemind.utils.mpfuture import MPFuture

    MPFuture.reset_backend()
    _AsyncContextWrapper.EXECUTOR_LOCK = multiprocessing.Lock()


def enter_namespace(name: str) -> None:
    """Enter a network namespace for all later sockets; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(handle, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    os.close(handle)


if __name__ == "__main__":
    main()
