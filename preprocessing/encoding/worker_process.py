"""Worker processes: a function that runs in a fresh Python, connected to this one.

Unlike those of multiprocessing, they never run the caller's script again, inherit no open file but their connection,
and end whenever this process ends, because that closes their connection.
"""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

END_TIMEOUT_S = 10.0


class Process:
    """A running function; talk to it through `connection`. Its first message is an ImportError if the new process
    cannot load the function or its arguments."""

    def __init__(self, function: Callable[..., None], *arguments: Any):
        """Start `function(connection, *arguments)`, all of which must be picklable; OSError if that fails."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                # -P: the current folder may contain a package `preprocessing`.
                [
                    sys.executable,
                    "-P",
                    "-c",
                    f"from preprocessing.encoding.worker_process import run; run({theirs.fileno()})",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,  # Ctrl+C must reach only this process, which ends the others
            )
        self.connection = Connection(ours.detach())
        # If the process has already died, that shows when its first message is awaited.
        with suppress(ConnectionError):
            self.connection.send_bytes(pickle.dumps((function, arguments)))

    def end(self) -> str:
        """Close the connection and wait for the process; returns how it ended."""
        self.connection.close()
        try:
            self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> str:
        """Like `end`, but without waiting for the function."""
        self.process.kill()
        return self.end()


def run(descriptor: int) -> None:
    """The work of a new process: load the function and its arguments, and call it or report why that fails."""
    connection = Connection(descriptor)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        content = connection.recv_bytes()
        try:
            function, arguments = pickle.loads(content)
        except Exception as error:
            connection.send(ImportError(f"it cannot load its function: {type(error).__name__}: {error}"))
            return
        function(connection, *arguments)
