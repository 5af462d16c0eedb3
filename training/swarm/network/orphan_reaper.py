"""Whatever happens to a process, what it has started does not outlive it: hivemind's processes, and p2pd."""

import os
import time
import uuid
from contextlib import suppress
from functools import cache
from multiprocessing import Process
from pathlib import Path

import psutil

WATCH_INTERVAL_S = 0.5
MARK = "DALLE_LEAN_STARTED_BY"


def guard_children() -> Process:
    """Start a process that ends all others of this one, children's children too, should this one be killed."""
    guard = Process(target=end_orphans, args=(os.getpid(), mark_of(os.getpid())), name="guard", daemon=True)
    guard.start()
    return guard


@cache
def mark_of(pid: int) -> str:
    """What all that this process, `pid`, starts from now on carries: forks as an open file of this name, other programs
    in their environment. Nothing that anybody else has started carries it."""
    mark = f"dalle-lean-{pid}-{uuid.uuid4().hex}"
    os.memfd_create(mark)  # open until the end
    os.environ[MARK] = mark
    return mark


def carries(process: psutil.Process, mark: str) -> bool:
    """Whether a process, or the one that it was forked from, was marked so."""
    with suppress(psutil.Error, OSError):
        if process.environ().get(MARK) == mark:
            return True
    with suppress(OSError):  # not ours to look at, or gone
        for file in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if mark in os.readlink(file):
                    return True
    return False


def end_orphans(parent: int, mark: str) -> None:
    """Wait until the process `parent` is gone, then kill what it had started."""
    os.setpgid(0, 0)  # Ctrl+C is for the others
    started: dict[int, psutil.Process] = {}
    while os.getppid() == parent:
        try:
            started |= {child.pid: child for child in psutil.Process(parent).children(recursive=True)}
        except psutil.NoSuchProcess:
            break
        time.sleep(WATCH_INTERVAL_S)
    end_all([process for process in started.values() if process.is_running()])
    while found := marked(mark):  # started since the last look, or while the others were ended
        end_all(found)
        time.sleep(WATCH_INTERVAL_S)


def marked(mark: str) -> list[psutil.Process]:
    """Those that carry it and live, but this one."""
    return [process for process in psutil.process_iter() if process.pid != os.getpid() and carries(process, mark)]


def descendants(process: psutil.Process) -> list[psutil.Process]:
    """What a process has started, and what those have."""
    try:
        found: list[psutil.Process] = process.children(recursive=True)
        return found
    except psutil.NoSuchProcess:
        return []


def end_all(processes: list[psutil.Process]) -> None:
    """Kill processes and what they have started."""
    for process in [child for orphan in processes for child in [*descendants(orphan), orphan]]:
        kill(process)


def end_children() -> None:
    """Kill what this process has started and what of it is left."""
    for child in descendants(psutil.Process()):
        kill(child)


def kill(process: psutil.Process) -> None:
    """End a process at once, unless it is gone or another one has its number now."""
    try:
        if process.pid != os.getpid():
            process.kill()
    except psutil.NoSuchProcess:
        pass
