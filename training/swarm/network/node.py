"""hivemind's DHT node, which goes on when a process that asked it something ends before it reads the question."""

from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import hivemind


class Node(hivemind.DHT):
    """A DHT node in a process of its own."""

    _inner_pipe: Any

    def run(self) -> None:
        self._inner_pipe = CallPipe(self._inner_pipe)
        super().run()


class CallPipe:
    """The pipe by which this machine's processes call the node's process."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)

    def recv(self) -> Any:
        """The next call.

        ConnectionResetError, which hivemind logs, where the caller has ended: its future's pipe, which is passed on by
        the caller's process, is gone. EOFError, which ends the node's process, where all callers have.
        """
        call = self.pipe.recv_bytes()
        try:
            return ForkingPickler.loads(call)
        except EOFError:
            raise ConnectionResetError("a process ended before its call of the DHT was read") from None
