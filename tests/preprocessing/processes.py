"""Processes below this one, as Linux tells of them."""

import os
import time
from pathlib import Path

TICK_S = 0.002


def descendants(pid: int | None = None) -> list[int]:
    """Living processes that `pid` (this one by default) started, and those that these started."""
    found = []
    for child in children(pid or os.getpid()):
        found += [child, *descendants(child)]
    return found


def ray_actors(pid: int | None = None) -> list[int]:
    """Ray's actors that hold a VQGAN, below `pid` or below this process."""
    return [one for one in descendants(pid) if b"ray::MapWorker(MapBatches(EncodingActor))" in command_line(one)]


def worker_processes() -> list[int]:
    """The worker processes that this process started itself."""
    return [one for one in children(os.getpid()) if b"preprocessing.encoding.decode_pool" in command_line(one)]


def peak_bytes(pid: int | None = None) -> int:
    """The most memory that `pid` (this process by default) has had; getrusage would say what the process it was forked
    from has had."""
    status = Path(f"/proc/{pid or os.getpid()}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it is gone
        return b""


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        texts = [(task / "children").read_text() for task in tasks]
    except OSError:
        return []
    return [int(child) for text in texts for child in text.split() if is_alive(int(child))]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, timeout_s: float = 120.0):
    """What `condition()` says, as soon as that is true. Time during which this process is stopped does not count."""
    for _ in range(round(timeout_s / TICK_S)):
        if answer := condition():
            return answer
        time.sleep(TICK_S)
    raise AssertionError("waited in vain")
