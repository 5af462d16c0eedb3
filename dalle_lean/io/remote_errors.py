"""Errors of remote files, permanent or temporary.

That a file does not exist or that access is denied is permanent; any other failure may pass.
"""

from ssl import SSLCertVerificationError
from typing import Any

from dalle_lean.errors import UserError

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
