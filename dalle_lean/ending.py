"""Ending on SIGTERM, with which Slurm, Kubernetes and spot machines ask a process to stop."""

import signal

EXIT_CODE = 143  # of a process ended by SIGTERM: 128 plus the signal's number


class Terminated(BaseException):
    """SIGTERM arrived and finished work is saved. Like KeyboardInterrupt it is not an Exception: only the code that
    ends the process catches it."""


def terminate(*_: object) -> None:
    """A handler of SIGTERM: ends the process as Ctrl+C does, and ignores further ones."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
