"""What helpers serve to a newcomer that knows only an address: the run's files, the time, and a dial-back.

An address ends in a peer id that libp2p verifies: a newcomer that trusts the address can trust the swarm.toml that it
gets there. Everything runs in the processes of the two DHT nodes.
"""

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2

from dalle_lean.errors import UserError, is_whole
from dalle_lean.io.files import write_bytes
from dalle_lean.tokenizer import MOST_TOKENIZER_BYTES
from training.swarm.config import SWARM_TOML, SwarmSettings, parse_settings, public_text, read_settings
from training.swarm.network.addresses import peer_of

TOKENIZER = "tokenizer.json"
LIMITS_BYTES = {SWARM_TOML: 2**18, TOKENIZER: MOST_TOKENIZER_BYTES}  # the largest files that a newcomer accepts
CHUNK_BYTES = 2**20  # libp2p's daemon limits answers to 2 MiB
PUBLIC = "public"  # folder in the run's folder whose files are served in their current version
PUBLIC_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,99}")
CALL_TIMEOUT_S = 15.0
DIAL_TIMEOUT_S = 3.0
MAX_DIALS = 8  # at the same time; more wait
MAX_DIAL_REQUEST_BYTES = 64  # so that those that wait hold little memory

T = TypeVar("T")


class Unanswered(UserError):
    """A helper did not answer, or not properly."""


@dataclass(frozen=True)
class RunFiles:
    """The files of a run that a newcomer needs."""

    settings: SwarmSettings
    settings_text: str
    """swarm.toml as it was sent: a helper elsewhere passes it on, maybe to older versions."""
    tokenizer: bytes
    """tokenizer.json."""

    def write(self, folder: Path) -> None:
        write_bytes(folder / SWARM_TOML, self.settings_text.encode())
        write_bytes(folder / TOKENIZER, self.tokenizer)


class BootstrapService(ServicerBase):
    """A helper's side. A request's `uid` names a file, its `metadata` is JSON."""

    def __init__(self, p2p: P2P, files: dict[str, bytes], public: Path):
        self.p2p, self.files, self.public = p2p, files, public
        self.dials = asyncio.Semaphore(MAX_DIALS)

    async def rpc_read(self, request: runtime_pb2.ExpertRequest, _: P2PContext) -> runtime_pb2.ExpertResponse:
        """A chunk of the file `uid`, of the run or public, from byte `metadata`; empty beyond its end."""
        name, start = request.uid, json.loads(request.metadata) or 0
        if not is_whole(start):
            raise ValueError(f"no byte {str(start)[:40]}")
        if name in self.files:
            return runtime_pb2.ExpertResponse(metadata=self.files[name][start : start + CHUNK_BYTES])
        if not PUBLIC_NAME.fullmatch(name) or not (self.public / name).is_file():
            raise ValueError(f"no file {name[:40]!r}")
        return runtime_pb2.ExpertResponse(metadata=read_chunk(self.public / name, start))

    rpc_read_public = rpc_read  # public files are asked for by it: older helpers serve them under no other

    async def rpc_time(self, _request: runtime_pb2.ExpertRequest, _: P2PContext) -> runtime_pb2.ExpertResponse:
        """Seconds since 1970."""
        return runtime_pb2.ExpertResponse(metadata=json.dumps(time.time()).encode())

    async def rpc_dial_back(self, request: runtime_pb2.ExpertRequest, caller: P2PContext) -> runtime_pb2.ExpertResponse:
        """Whether port `metadata` accepts connections at the caller's address."""
        if request.ByteSize() > MAX_DIAL_REQUEST_BYTES:
            raise ValueError("more than a port")
        port = json.loads(request.metadata)
        if type(port) is not int or not 1 <= port <= 65535:
            raise ValueError(f"no port {port!r}")
        hosts = await hosts_of(self.p2p, caller.remote_id)
        async with asyncio.timeout(CALL_TIMEOUT_S), self.dials:
            answers = [await accepts_connections(host, port) for host in hosts[:2]]
        return runtime_pb2.ExpertResponse(metadata=json.dumps(any(answers)).encode())


def read_chunk(path: Path, start: int) -> bytes:
    """Up to CHUNK_BYTES of a file from byte `start`."""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(CHUNK_BYTES)


async def hosts_of(p2p: P2P, caller: PeerID) -> list[str]:
    """The IP addresses that a peer calls from."""
    addresses = [address for peer in await p2p.list_peers() if peer.peer_id == caller for address in peer.addrs]
    return sorted({str(address[kind]) for address in addresses for kind in ("ip4", "ip6") if kind in address})


async def accepts_connections(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), DIAL_TIMEOUT_S)
    except (TimeoutError, OSError):
        return False
    writer.close()
    return True


def offer_run(dht: hivemind.DHT, folder: Path) -> None:
    """Serve the run's current files in `folder` while the node runs; ValueError if one is larger than a newcomer
    accepts."""
    for name, limit_bytes in LIMITS_BYTES.items():
        size_bytes = (folder / name).stat().st_size
        if size_bytes > limit_bytes:
            raise UserError(f"{folder / name} has {size_bytes} bytes: newcomers accept {limit_bytes} at most")
    run_in_node(dht, partial(serve, folder))


async def serve(folder: Path, _: hivemind.DHT, node: DHTNode) -> None:
    """Runs in the node's process, which reads the files itself, since its pipe accepts only small objects."""
    files = {name: (folder / name).read_bytes() for name in LIMITS_BYTES}
    files[SWARM_TOML] = public_text(files[SWARM_TOML].decode(), read_settings(folder).swarm).encode()
    await BootstrapService(node.p2p, files, folder / PUBLIC).add_p2p_handlers(node.p2p)


def run_in_node(dht: hivemind.DHT, coroutine: Callable[..., Any]) -> Any:
    """The result of `coroutine(dht, node)`, run in the node's process; Unanswered if that process is gone."""
    try:
        return dht.run_coroutine(coroutine, return_future=True).result(timeout=2 * CALL_TIMEOUT_S)
    except TimeoutError:
        raise Unanswered("this machine's own DHT node does not answer; run the command again") from None


def fetch_run(dht: hivemind.DHT, address: str) -> RunFiles:
    """The run's files from the helper at `address`, one of those that `dht` was opened with.

    Raises:
        Unanswered: no answer in time, or one that is too large or malformed.
        ValueError: a swarm.toml that this version cannot read.
    """
    text = fetch_settings_text(dht, address)
    settings = parse_settings(text, f"the swarm.toml of {address}")
    tokenizer = read_file(dht, address, TOKENIZER)
    if hashlib.sha256(tokenizer).hexdigest() != settings.swarm.tokenizer_fingerprint:
        raise Unanswered(f"{address} sent another tokenizer.json than its swarm.toml names")
    return RunFiles(settings, text, tokenizer)


def fetch_settings(dht: hivemind.DHT, address: str) -> SwarmSettings:
    """The run's current settings: after a rollback, a run continues under another run id."""
    return parse_settings(fetch_settings_text(dht, address), f"the swarm.toml of {address}")


def fetch_settings_text(dht: hivemind.DHT, address: str) -> str:
    try:
        return read_file(dht, address, SWARM_TOML).decode()
    except UnicodeDecodeError:
        raise Unanswered(f"{address} sent a swarm.toml that is not UTF-8") from None


def remote_time(dht: hivemind.DHT, address: str) -> float:
    """The helper's clock now, in seconds since 1970, to within half a round trip."""
    started = time.monotonic()
    answer = call(dht, address, "rpc_time")
    if type(answer) is not float or not 0 < answer < 2**40:
        raise Unanswered(f"{address} did not send a time")
    return answer + (time.monotonic() - started) / 2


def is_reachable(dht: hivemind.DHT, address: str, port: int) -> bool:
    """Whether the helper can connect to TCP `port` at the address that it sees for this machine."""
    return call(dht, address, "rpc_dial_back", metadata=port) is True


def first_answer(dht: hivemind.DHT | None, addresses: Sequence[str], ask: Callable[[hivemind.DHT, str], T]) -> T | None:
    """`ask(dht, address)` of the first helper that answers; None if none does."""
    for address in addresses if dht is not None else ():
        try:
            return ask(dht, address)
        except Unanswered:
            continue
    return None


def read_file(dht: hivemind.DHT, address: str, name: str) -> bytes:
    """Fetch one of the helper's files, chunk by chunk."""
    content = bytearray()
    while True:
        piece = call(dht, address, "rpc_read", uid=name, metadata=len(content), is_json=False)
        content += piece
        if len(content) > LIMITS_BYTES[name]:
            raise Unanswered(f"{address} sends a {name} of more than {LIMITS_BYTES[name]} bytes")
        if len(piece) < CHUNK_BYTES:
            return bytes(content)


def fetch_public(dht: hivemind.DHT, address: str, name: str, start: int = 0) -> bytes:
    """Up to CHUNK_BYTES of a public file of the helper's run from byte `start`.

    Raises Unanswered if there is none.
    """
    content: bytes = call(dht, address, "rpc_read_public", uid=name, metadata=start, is_json=False)
    return content


def credits_name(peer: object) -> str:
    """The public file in which the helper with this peer id keeps its attestation."""
    return f"attested-{peer}.json"


def call(
    dht: hivemind.DHT,
    address: str,
    method: str,
    *,
    uid: str = "",
    metadata: Any = None,
    is_json: bool = True,
    service: type[ServicerBase] = BootstrapService,
) -> Any:
    """Call a helper; raises Unanswered unless it answers properly. `metadata` is sent as JSON, bytes as they are."""
    content = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    answer = run_in_node(
        dht, partial(ask, service=service, peer=peer_of(address), method=method, content=content, uid=uid)
    )
    return read_answer(address, method, answer, is_json=is_json)


def call_each(
    dht: hivemind.DHT,
    uids: Mapping[str, str],
    method: str,
    *,
    is_json: bool = True,
    service: type[ServicerBase] = BootstrapService,
) -> dict[str, Any]:
    """As `call`, of several helpers at once: the answers of those that answer properly. Both are by address."""
    asks = [
        partial(ask, service=service, peer=peer_of(address), method=method, content=b"null", uid=uid)
        for address, uid in uids.items()
    ]
    found = {}
    with suppress(Unanswered):
        answers = run_in_node(dht, partial(ask_all, asks))
        for address, answer in zip(uids, answers, strict=True):
            with suppress(Unanswered):
                found[address] = read_answer(address, method, answer, is_json=is_json)
    return found


def read_answer(address: str, method: str, answer: bytes | str, *, is_json: bool) -> Any:
    """The content of an answer of `ask`; raises Unanswered if it is none."""
    if isinstance(answer, str):
        raise Unanswered(f"{address} did not answer {method.removeprefix('rpc_')}: {answer}")
    if not is_json and len(answer) > CHUNK_BYTES:
        raise Unanswered(f"{address} sends more than {CHUNK_BYTES} bytes of a file at once")
    try:
        return json.loads(answer) if is_json else answer
    except (ValueError, RecursionError):
        raise Unanswered(f"{address} answered {method.removeprefix('rpc_')} with something other than JSON") from None


async def ask_all(asks: Sequence[Callable[..., Any]], dht: Any, node: DHTNode) -> list[bytes | str]:
    """Runs in the node's process; returns the results of several calls of `ask` at once."""
    return await asyncio.gather(*(one(dht, node) for one in asks))


async def ask(
    _: Any, node: DHTNode, *, service: type[ServicerBase], peer: PeerID, method: str, content: bytes, uid: str = ""
) -> bytes | str:
    """Runs in the node's process; returns the answer, or what went wrong."""
    try:
        request = runtime_pb2.ExpertRequest(uid=uid, metadata=content)
        answer = await getattr(service.get_stub(node.p2p, peer), method)(request, timeout=CALL_TIMEOUT_S)
        return bytes(answer.metadata)
    except TimeoutError:
        return f"no answer in {CALL_TIMEOUT_S:.0f} s"
    except Exception as error:  # whatever the helper does wrong
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
