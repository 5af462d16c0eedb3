"""hivemind's DHT node, behind a gate in a run with a key, and robust against callers that end too early."""

import asyncio
import logging
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P

from training.swarm.admission.gate import Gate
from training.swarm.admission.guard import guarded


class Node(hivemind.DHT):
    """A DHT node in its own process. Its averagers pass its gate too."""

    _inner_pipe: Any

    def __init__(self, *, gate: Gate | None, **options: Any):
        self.gate = gate
        super().__init__(**options)

    def run(self) -> None:
        self._inner_pipe = CallPipe(self._inner_pipe)
        create = P2P.create

        async def create_guarded(**options: Any) -> P2P:
            return guarded(await create(**options), self.gate)

        P2P.create = staticmethod(create_guarded)  # in the node's own process only, which creates its P2P
        super().run()

    async def replicate_p2p(self) -> P2P:
        return guarded(await super().replicate_p2p(), self.gate)

    async def _ignore(self) -> None:
        """Called in place of a call that cannot be read."""


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
        """The next call, or one that does nothing if its caller has ended and its future's pipe with it: after an
        error here hivemind's node would answer nobody for seconds and could not be shut down.

        Raises EOFError, which ends the node's process, if all callers have ended.
        """
        call = self.pipe.recv_bytes()
        try:
            return ForkingPickler.loads(call)
        except (EOFError, ConnectionError, FileNotFoundError) as error:
            logging.getLogger("hivemind").info("a process ended before its call to the DHT was read: %r", error)
            return Node._ignore.__name__, [], {}
