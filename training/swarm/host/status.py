"""RUN_DIR/status/NAME.json: each of the host's peers reports its status there to the supervisor."""

import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dalle_lean.io.files import read_json, write_json
from dalle_lean.words import counted

STATUS_INTERVAL_S = 2.0
KEPT_NOTICES = 20


def status_path(run_dir: Path, name: str) -> Path:
    return run_dir / "status" / f"{name}.json"


def read_status(run_dir: Path, name: str) -> dict[str, Any]:
    """A peer's latest report; empty before its first."""
    path = status_path(run_dir, name)
    content: dict[str, Any] = read_json(path) if path.exists() else {}
    return content


class StatusFile:
    """Written by the peer itself, from any thread."""

    def __init__(self, run_dir: Path, name: str):
        self.path = status_path(run_dir, name)
        self.content: dict[str, Any] = {"pid": os.getpid(), "notices": [], "noticed": 0}
        self.lock, self.written_s = threading.RLock(), -math.inf

    def notice(self, line: str) -> None:
        log(line)
        with self.lock:
            notices = [*self.content["notices"], line][-KEPT_NOTICES:]
            self.update(notices=notices, noticed=self.content["noticed"] + 1)

    def update(self, **changes: Any) -> None:
        """Write changes at once, and unchanged content every STATUS_INTERVAL_S."""
        changes = {name: None if value != value else value for name, value in changes.items()}  # JSON has no nan
        with self.lock:
            if changes.items() <= self.content.items() and time.monotonic() - self.written_s < STATUS_INTERVAL_S:
                return
            self.content |= changes
            self.written_s = time.monotonic()
            try:
                write_json(self.path, self.content)
            except OSError as error:  # a full disk must not end the peer
                log(f"{self.path} could not be written: {error}")


def log(line: str) -> None:
    """Print a line to this peer's log, which may be on a full disk."""
    with suppress(OSError):
        print(line, flush=True)


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """A run's progress, as its donors report it.

    `heldout_loss` is None before it is measured. `checkpoint` is the latest one's step, 0 before the first, None if
    another machine keeps the checkpoints.
    """

    step: int = 0
    trainers: int = 0
    heldout_loss: float | None = None
    checkpoint: int | None = None
    failed_saves: int = 0

    @classmethod
    def of_peers(cls, run_dir: Path, names: list[str]) -> "RunStatus":
        """The report of the most advanced of these peers."""
        reports = [read_status(run_dir, name) for name in names]
        leader = max(reports, key=lambda report: report.get("step") or 0)
        return cls(**{name: leader[name] for name in cls.__dataclass_fields__ if leader.get(name) is not None})

    @property
    def note(self) -> str:
        words = [counted(self.trainers, "trainer")]
        if self.heldout_loss is not None:
            words.append(f"held-out loss {self.heldout_loss:.4g}")
        if self.checkpoint is not None:
            words.append(f"checkpoint of step {self.checkpoint}" if self.checkpoint else "no checkpoint yet")
        if self.failed_saves:
            words.append(f"{counted(self.failed_saves, 'checkpoint')} could not be written")
        return ", ".join(words)
