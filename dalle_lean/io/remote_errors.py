"""Files on other machines: what a failure to read one means.

What a storage says is not there, or is not for us, stays so however often it is asked; anything else may pass.
"""

from ssl import SSLCertVerificationError
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.require import require

HTTP = ("http://", "https://")
NOT_THERE = (404, 410)
FORBIDDEN = (401, 403)


class Unreachable(OSError):
    """A file on another machine could not be read; nothing is known to be wrong with the file."""


class Refused(Unreachable):
    """A storage does not give a file as it is needed, and will not however often it is asked."""


def storage_of(url: str, extra: str) -> tuple[Any, str]:
    """The file system, as fsspec has it, that holds a URL or path, and the file's name there; `extra` brings fsspec.

    UserError for a protocol that fsspec does not know, or whose package is not installed.
    """
    fsspec = require("fsspec", extra=extra)
    try:
        storage, name = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise UserError(f"{url}: its kind of storage cannot be read here ({' '.join(str(error).split())})") from None
    return storage, name


def meaning(error: Exception, url: str) -> Exception:
    """What a failure to read `url` means: FileNotFoundError or its like, Refused, or what is worth another try.

    A UserError stays what it is: no other try helps.
    """
    if isinstance(error, UserError):
        return error
    reason: BaseException = error
    if isinstance(error, FileNotFoundError) and url.startswith(HTTP) and error.__cause__ is not None:
        reason = error.__cause__  # fsspec's HTTP says FileNotFoundError of any failure to open, an outage too
    status = http_status(reason)
    if status in NOT_THERE:
        return FileNotFoundError(f"{url}: not there ({one_line(reason)})")
    if status in FORBIDDEN or isinstance(reason, PermissionError):
        return Refused(f"{url}: its storage refuses access ({one_line(reason)}); sign in there, or ask its owner")
    if isinstance(reason, SSLCertVerificationError):  # a ValueError too
        return Refused(f"{url}: its server's certificate is not trusted ({one_line(reason)})")
    if isinstance(reason, ValueError) and url.startswith(HTTP):
        return Refused(
            f"{url}: its server does not give parts of a file, byte ranges ({one_line(reason)}); use one that does, or "
            "copy the file here"
        )
    return reason if isinstance(reason, Exception) else error


def http_status(error: BaseException) -> int | None:
    """The status that a library for HTTP notes on its error."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
