"""Remote files: what their errors mean, and requests that are retried with back-off for a limited time.

That a file does not exist or that access is denied is permanent; any other failure may pass.
"""

import io
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from ssl import SSLCertVerificationError
from typing import Any, TypeVar

from dalle_lean.errors import UserError
from dalle_lean.progress import OnNotice, silent

T = TypeVar("T")
HTTP = ("http://", "https://")


class Unreachable(OSError):
    """A remote file could not be read or written; nothing is known to be wrong with the file."""


class Refused(Unreachable):
    """A storage permanently refuses a file, or refuses the way in which it is needed."""


def storage_of(url: str) -> tuple[Any, str]:
    """(fsspec's file system of a URL or path, the file's name there). UserError for a protocol that fsspec does not
    know or whose package is not installed."""
    import fsspec  # a third of a second, which few commands need

    try:
        storage, name = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"{url}: its kind of storage cannot be read here ({' '.join(str(error).split())})") from None
    return storage, name


def meaning(error: Exception, url: str) -> Exception:
    """The cause of a failure to read `url`: FileNotFoundError and Refused are permanent, others are worth a retry. A
    UserError is returned as it is."""
    if isinstance(error, UserError):
        return error
    reason: BaseException = error
    if isinstance(error, FileNotFoundError) and url.startswith(HTTP) and error.__cause__ is not None:
        reason = error.__cause__  # over HTTP, fsspec raises FileNotFoundError for any failure to open, outages too
    status = getattr(reason, "status", None) or getattr(getattr(reason, "response", None), "status_code", None)
    if status in (404, 410):
        return FileNotFoundError(f"{url}: not there ({one_line(reason)})")
    if status in (401, 403) or isinstance(reason, PermissionError):
        return Refused(f"{url}: its storage refuses access ({one_line(reason)}); sign in there, or ask its owner")
    if isinstance(reason, SSLCertVerificationError):  # a ValueError too
        return Refused(f"{url}: its server's certificate is not trusted ({one_line(reason)})")
    if isinstance(reason, ValueError) and url.startswith(HTTP):
        return Refused(
            f"{url}: its server does not give parts of a file, byte ranges ({one_line(reason)}); use one that does, or "
            "copy the file here"
        )
    return reason if isinstance(reason, Exception) else error


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


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
