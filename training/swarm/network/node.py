"""hivemind's DHT node, made robust against callers that end before their call is read."""

import asyncio
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import hivemind
from hivemind.dht.node import DHTNode


class Node(hivemind.DHT):
    """A DHT node in its own process."""

    _inner_pipe: Any

    def run(self) -> None:
        self._inner_pipe = CallPipe(self._inner_pipe)
        super().run()


def run_until_shutdown(node: DHTNode, coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine beside the node, in its process, until the node shuts down."""
    task, shutdown = asyncio.create_task(coroutine), node.shutdown

    async def cancel_and_shutdown() -> None:
        task.cancel()
        await shutdown()

    node.shutdown = cancel_and_shutdown


class CallPipe:
    """The pipe through which this machine's processes call the node's process."""

    def __init__(self, pipe: Connection):
        self.pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)

    def recv(self) -> Any:
        """The next call.

        Raises ConnectionResetError, which hivemind logs, if the caller has ended and its future's pipe with it, and
        EOFError, which ends the node's process, if all callers have.
        """
        call = self.pipe.recv_bytes()
        try:
            return ForkingPickler.loads(call)
        except EOFError:
            raise ConnectionResetError("a process ended before its call to the DHT was read") from None
