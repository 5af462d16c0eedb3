"""Addresses, ports and identity files of this machine, and parsing of peers' addresses.

An identity file holds a peer's private key, from which its peer id follows.
"""

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from dalle_lean.errors import UserError
from dalle_lean.io.files import atomic_write

EVERYWHERE = "0.0.0.0"
LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 1.0


def peer_of(address: str) -> PeerID:
    """The peer id at the end of an address; ValueError if it is not an address."""
    try:
        return PeerID.from_base58(Multiaddr(address)["p2p"])
    except Exception:  # the parsers raise various errors
        raise UserError(
            f"{address!r} is not an address: it looks like /ip4/203.0.113.5/tcp/31337/p2p/Qm... and ends in a whole "
            "peer id; copy all of it"
        ) from None


def addresses_of(targets: Sequence[str]) -> tuple[str, ...]:
    """The targets if all are addresses, () for a single file; ValueError otherwise."""
    addresses = [target for target in targets if "/p2p/" in target or target.startswith("/ip4/")]
    if len(addresses) not in (0, len(targets)) or (not addresses and len(targets) != 1):
        raise UserError(f"{' '.join(targets)}: name one swarm.toml, or addresses of one run (/ip4/.../tcp/.../p2p/...)")
    for address in addresses:
        peer_of(address)
    return tuple(addresses)


def announced_address(address: str, port: int) -> str:
    """An IPv4 address as /ip4/ADDRESS/tcp/PORT, and an address with a port as it is; UserError for anything else."""
    if "/" not in address:
        check_ip(address)
        return f"/ip4/{address}/tcp/{port}"
    try:
        Multiaddr(address)["tcp"]
    except Exception:  # the parser raises various errors
        raise UserError(f"--announce {address}: it looks like 203.0.113.5 or /ip4/203.0.113.5/tcp/31337") from None
    return address


def check_ip(address: str) -> None:
    """ValueError unless it is an IPv4 address."""
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        raise UserError(f"{address!r} is not an IPv4 address such as 203.0.113.5") from None


def outward_ip() -> str:
    """This machine's local address: the source of its packets to the Internet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; TEST-NET-1 of RFC 5737
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK


def free_ports(count: int, host: str = EVERYWHERE) -> list[int]:
    """TCP ports that are free at the moment."""
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server((host, 0))).getsockname()[1] for _ in range(count)]


def port_is_free(port: int) -> bool:
    try:
        socket.create_server((EVERYWHERE, port)).close()
    except OSError:
        return False
    return True


def is_listening(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def is_listening_at(address: str) -> bool:
    """Whether something accepts connections at an address /ip4/HOST/tcp/PORT/p2p/..."""
    _, _, host, _, port, *_ = address.split("/")
    return is_listening(host, int(port))


def make_identity(path: Path) -> None:
    """Create a private key, readable by this user only, unless there is one."""
    if not path.exists():
        with atomic_write(path, 0o600) as temporary:
            P2P.generate_identity(str(temporary))


def peer_id_in(path: Path) -> str:
    return str(PeerID.from_identity(path.read_bytes()).to_base58())
