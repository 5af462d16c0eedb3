"""A log file that stays small, whoever writes it for however long."""

import fcntl
import os
from contextlib import suppress
from logging import LogRecord
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

LOG_BYTES = 10_000_000


def set_aside(log: Path, limit_bytes: int = LOG_BYTES) -> None:
    """Move a log that has reached its limit to NAME.1, in the place of the one before."""
    if log.exists() and log.stat().st_size >= limit_bytes:
        os.replace(log, f"{log}.1")


class BoundedFileHandler(WatchedFileHandler):
    """Writes to a file, which is set aside as NAME.1 when it has `limit_bytes`, so that at most two of them are kept.

    Several processes may write the same file, such as those that hivemind forks: one of them sets it aside, the others
    follow. logging's RotatingFileHandler would have each of them set aside what another one has just begun.

    Args:
        output: what this process and its libraries print goes to the file too, also after it was set aside.
    """

    def __init__(self, path: Path, *, limit_bytes: int = LOG_BYTES, output: bool = False):
        self.path, self.limit_bytes, self.output = path, limit_bytes, output
        super().__init__(path, encoding="utf-8")

    def _open(self) -> Any:
        stream = super()._open()
        if self.output:
            for descriptor in (1, 2):
                os.dup2(stream.fileno(), descriptor)
        return stream

    def emit(self, record: LogRecord) -> None:
        try:
            if self.stream is not None and os.fstat(self.stream.fileno()).st_size >= self.limit_bytes:
                self.set_aside(self.stream.fileno())
        except OSError:
            self.handleError(record)
        super().emit(record)  # opens the new file, whoever set the other one aside or closed it

    def set_aside(self, opened: int) -> None:
        """Move the file that is open as this descriptor, unless another process has done so meanwhile."""
        fcntl.lockf(opened, fcntl.LOCK_EX)
        try:
            with suppress(FileNotFoundError):  # another one has, and not begun the new file yet
                if os.path.samestat(self.path.stat(), os.fstat(opened)):
                    os.replace(self.path, f"{self.path}.1")
        finally:
            fcntl.lockf(opened, fcntl.LOCK_UN)
