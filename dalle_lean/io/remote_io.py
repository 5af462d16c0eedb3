"""Remote files: requests are retried with back-off for a limited time, and each retry is reported."""

import io
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from dalle_lean.errors import UserError
from dalle_lean.io.remote_errors import Refused, Unreachable, meaning, one_line, storage_of
from dalle_lean.progress import OnNotice, silent

T = TypeVar("T")
# Retrying does not help.
PERMANENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, Refused, UserError)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a remote file, and how often to retry."""

    timeout_s: float = 60.0  # for one answer; a request that takes longer is abandoned and repeated
    first_wait_s: float = 1.0  # the pause after the first failure, which doubles up to `longest_wait_s`
    longest_wait_s: float = 60.0
    give_up_s: float = 1800.0  # from the first failure of a request to `Unreachable`

    def insist(self, what: str, action: Callable[[], T], on_notice: OnNotice = silent) -> T:
        """Retry `action` on the URL `what` until it succeeds, and return its value; each pause is reported. Raises
        Unreachable after `give_up_s`, and the errors in PERMANENT at once."""
        wait_s, give_up_at_s = self.first_wait_s, math.inf
        while True:
            try:
                return within(self.timeout_s, action)
            except Exception as failure:
                error = meaning(failure, what)
                if isinstance(error, PERMANENT):
                    raise error from None
                reason = one_line(error)
                give_up_at_s = min(give_up_at_s, time.monotonic() + self.give_up_s)
                if time.monotonic() + wait_s > give_up_at_s:
                    raise Unreachable(f"{what} could not be read for {self.give_up_s:g} s ({reason})") from None
                on_notice(f"{what} cannot be read ({reason}); trying again in {wait_s:g} s")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, self.longest_wait_s)


def within(timeout_s: float, action: Callable[[], T]) -> T:
    """The value of `action`; TimeoutError after `timeout_s`, when a hanging action stays behind in its thread."""
    outcome: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def act() -> None:
        try:
            outcome.put((True, action()))
        except BaseException as error:
            outcome.put((False, error))

    threading.Thread(target=act, daemon=True, name="remote read").start()
    try:
        succeeded, value = outcome.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"no answer within {timeout_s:g} s") from None
    if not succeeded:
        raise value
    return value


class RemoteFile(io.RawIOBase):
    """A file at a URL that fsspec knows, open for reading. Every read is one request, retried as `patience` says."""

    def __init__(self, url: str, patience: Patience, on_notice: OnNotice = silent):
        self.url, self.patience, self.on_notice = url, patience, on_notice
        self.place = 0
        self.files, self.path = storage_of(url)
        self.size: int = patience.insist(url, self.find_size, on_notice)

    def find_size(self) -> int:
        size = self.files.info(self.path)["size"]
        if size is None:
            raise ValueError("its size is unknown")
        return int(size)

    def fetch(self, start: int, end: int) -> bytes:
        content: bytes = self.files.cat_file(self.path, start=start, end=end)
        if len(content) > end - start:
            raise ValueError("the whole file came")
        if len(content) != end - start:
            raise OSError(f"{len(content)} bytes came, {end - start} were asked for")
        return content

    def readinto(self, buffer: Any) -> int:
        start, end = self.place, min(self.place + len(buffer), self.size)
        if start >= end:
            return 0
        content = self.patience.insist(self.url, partial(self.fetch, start, end), self.on_notice)
        buffer[: len(content)] = content
        self.place = end
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def tell(self) -> int:
        return self.place

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
