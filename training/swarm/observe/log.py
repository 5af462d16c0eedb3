"""A log file of limited size that several processes can write."""

import fcntl
import os
from contextlib import suppress
from logging import LogRecord
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

LOG_BYTES = 10_000_000


def rotate_log(log: Path) -> None:
    """Rename a log that has reached its limit to NAME.1, replacing an older one."""
    if log.exists() and log.stat().st_size >= LOG_BYTES:
        os.replace(log, f"{log}.1")


class BoundedFileHandler(WatchedFileHandler):
    """Rotates its file to NAME.1 at LOG_BYTES, so that at most two files are kept.

    Several processes may write the file, such as those that hivemind forks: one of them rotates it, the others follow.
    With logging's RotatingFileHandler, each would rotate the file that another has just started.

    Args:
        output: send this process's stdout and stderr to the file too.
    """

    def __init__(self, path: Path, *, output: bool = False):
        self.path, self.output = path, output
        super().__init__(path, encoding="utf-8")

    def _open(self) -> Any:
        stream = super()._open()
        if self.output:
            for descriptor in (1, 2):
                os.dup2(stream.fileno(), descriptor)
        return stream

    def emit(self, record: LogRecord) -> None:
        try:
            if self.stream is not None and os.fstat(self.stream.fileno()).st_size >= LOG_BYTES:
                self.rotate(self.stream.fileno())
        except OSError:
            self.handleError(record)
        super().emit(record)  # opens the new file if the old one was renamed or closed

    def rotate(self, opened: int) -> None:
        """Rename the file that is open as this descriptor, unless another process already has."""
        fcntl.lockf(opened, fcntl.LOCK_EX)
        try:
            with suppress(FileNotFoundError):  # another process has, and has not created the new file yet
                if os.path.samestat(self.path.stat(), os.fstat(opened)):
                    os.replace(self.path, f"{self.path}.1")
        finally:
            fcntl.lockf(opened, fcntl.LOCK_UN)
