"""Ends the processes that a process started, such as hivemind's and p2pd, if it dies."""

import os
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from multiprocessing import Process
from pathlib import Path

import psutil

WATCH_INTERVAL_S = 0.5
MARK = "DALLE_LEAN_STARTED_BY"


def guard_children() -> Process:
    """Start a process that ends all descendants of this one if it is killed."""
    guard = Process(target=end_orphans, args=(os.getpid(), mark_of(os.getpid())), name="guard", daemon=True)
    guard.start()
    return guard


@cache
def mark_of(pid: int) -> str:
    """Mark everything that this process, `pid`, starts from now on: forks inherit an open file of this name, other
    programs an environment variable."""
    mark = f"dalle-lean-{pid}-{uuid.uuid4().hex}"
    os.memfd_create(mark)  # stays open
    os.environ[MARK] = mark
    return mark


def carries(process: psutil.Process, mark: str) -> bool:
    """Whether a process has inherited this mark."""
    with suppress(psutil.Error, OSError):
        if process.environ().get(MARK) == mark:
            return True
    with suppress(OSError):  # not ours, or gone
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if mark in os.readlink(file):
                    return True
    return False


def end_orphans(parent: int, mark: str) -> None:
    """Wait until the process `parent` is gone, then kill what it started."""
    os.setpgid(0, 0)  # Ctrl+C does not reach this process
    started: dict[int, psutil.Process] = {}
    while os.getppid() == parent:
        try:
            started |= {child.pid: child for child in psutil.Process(parent).children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(WATCH_INTERVAL_S)
    end_all([process for process in started.values() if process.is_running()])
    while found := marked(mark):  # started in the meantime
        end_all(found)
        time.sleep(WATCH_INTERVAL_S)


def marked(mark: str) -> list[psutil.Process]:
    """Running processes that carry the mark, except this one."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and carries(process, mark)]


def end_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes and their descendants, this one excepted."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            end_all(process.children())
        with suppress(psutil.NoSuchProcess):
            if process.pid != os.getpid():
                process.kill()


def end_children() -> None:
    """Kill the descendants of this process."""
    end_all(psutil.Process().children())
