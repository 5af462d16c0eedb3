"""Checks passes at every call of hivemind's; only this file uses hivemind's private names for admission.

All calls between peers, by the DHT and by the averagers, go through hivemind's client of the libp2p daemon. In a run
with a key, each side sends its pass first: before a request, before its answer, and at the start of a stream in both
directions. A peer without a pass is refused before a byte of its message is parsed.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

from hivemind.p2p import P2P, P2PHandlerError, PeerID
from hivemind.proto.p2pd_pb2 import RPCError

from training.swarm.admission.gate import Gate
from training.swarm.admission.limits import Limits
from training.swarm.admission.passes import MAX_PASS_BYTES, Refused

PUBLIC = ("BootstrapService.", "AdmissionService.")  # methods that newcomers may call, which have no pass yet
LENGTH_BYTES = 2
HANDSHAKE_S = 5.0


def guarded(p2p: P2P, gate: Gate | None) -> P2P:
    """The same P2P, with the gate in front of it if there is one."""
    if gate is not None and not isinstance(p2p._client, GuardedClient):
        p2p._client = GuardedClient(p2p._client, gate)
    return p2p


class GuardedClient:
    """hivemind's client of the libp2p daemon, which sends and checks passes."""

    def __init__(self, client: Any, gate: Gate):
        self.client, self.gate, self.limits = client, gate, Limits()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    async def add_unary_handler(self, proto: str, handler: Callable[..., Any], balanced: bool = False) -> None:
        async def answer(request: bytes, peer: PeerID) -> bytes:
            caller = str(peer)
            try:
                if not proto.startswith(PUBLIC):
                    shown, request = unframed(request)
                    self.gate.check(caller, shown)
                self.limits.count_call(caller, known=self.gate.is_admitted(caller))
            except Refused:
                self.gate.count_refusal()
                raise
            answered: bytes = await handler(request, peer)
            return answered if proto.startswith(PUBLIC) else framed(self.gate.own_statement) + answered

        await self.client.add_unary_handler(proto, answer, balanced=balanced)

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        if proto.startswith(PUBLIC):
            answer: bytes = await self.client.call_unary_handler(peer_id, proto, data)
            return answer
        self.checked(self.gate.check_ban, peer_id)
        answer = await self.client.call_unary_handler(peer_id, proto, framed(self.gate.own_statement) + data)
        shown, answer = unframed(answer)
        self.checked(self.gate.check, peer_id, shown)
        return answer

    async def stream_handler(self, proto: str, handler: Callable[..., Any], balanced: bool = False) -> None:
        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            caller = str(info.peer_id)
            with closing(writer), ExitStack() as open_streams:
                try:
                    open_streams.enter_context(self.limits.stream(caller))
                    with self.limits.handshake(known=self.gate.is_admitted(caller)):
                        writer.write(framed(self.gate.own_statement))
                        self.gate.check(caller, await asyncio.wait_for(read_frame(reader), HANDSHAKE_S))
                    self.limits.count_call(caller, known=True)
                except (Refused, TimeoutError, OSError, asyncio.IncompleteReadError) as refusal:
                    self.gate.count_refusal()
                    with suppress(OSError):
                        await P2P.send_protobuf(RPCError(message=str(refusal)), writer)
                    return
                await handler(info, reader, writer)

        await self.client.stream_handler(proto, serve, balanced)

    async def stream_open(self, peer_id: PeerID, protocols: Sequence[str]) -> tuple[Any, Any, asyncio.StreamWriter]:
        self.checked(self.gate.check_ban, peer_id)
        info, reader, writer = await self.client.stream_open(peer_id, protocols)
        writer.write(framed(self.gate.own_statement))
        return info, AdmittedReader(reader, lambda shown: self.checked(self.gate.check, peer_id, shown)), writer

    def checked(self, check: Callable[..., Any], peer_id: PeerID, *arguments: bytes) -> None:
        """Check the called peer; hivemind expects P2PHandlerError when a call fails."""
        try:
            check(str(peer_id), *arguments)
        except Refused as refusal:
            raise P2PHandlerError(f"{peer_id} is not called: {refusal.found}") from None


class AdmittedReader:
    """Reads a called peer's answers, after its pass."""

    def __init__(self, reader: asyncio.StreamReader, check: Callable[[bytes], None]):
        self.reader, self.check, self.has_shown = reader, check, False

    async def readexactly(self, count: int) -> bytes:
        """As asyncio's StreamReader; P2PHandlerError unless the peer is admitted."""
        if not self.has_shown:
            self.check(await read_frame(self.reader))
            self.has_shown = True
        return await self.reader.readexactly(count)


def framed(statement: bytes) -> bytes:
    """A pass with its length in front."""
    return len(statement).to_bytes(LENGTH_BYTES, "big") + statement


def unframed(message: bytes) -> tuple[bytes, bytes]:
    """The pass in front of a message, and the message."""
    end = LENGTH_BYTES + int.from_bytes(message[:LENGTH_BYTES], "big")
    return message[LENGTH_BYTES:end], message[end:]


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The pass at the start of a stream; empty if there is none."""
    count = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    return await reader.readexactly(count) if 0 < count <= MAX_PASS_BYTES else b""
