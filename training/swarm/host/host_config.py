"""The host's own peers: what they are called, where they listen, and who they are."""

import dataclasses
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hivemind.p2p import P2P, PeerID

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json

NAME = "host.json"
IDENTITIES = "identities"
EVERYWHERE = "0.0.0.0"
LOOPBACK = "127.0.0.1"
CONNECT_TIMEOUT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """What host.json holds; it concerns this machine alone.

    Args:
        ports: of each peer; the helpers come first.
        listen: the address on this machine that all of them listen on.
        announce: the address at which others reach it.
        vqgan: folder of the VQGAN for the checkpoints' model folders.
        vqgan_fingerprint: of the one that made the codes.
        helper_of: addresses of a run that is hosted elsewhere, which has a helper here; none for a run of one's own.
    """

    ports: dict[str, int]
    listen: str = EVERYWHERE
    announce: str = LOOPBACK
    vqgan: str | None = None
    vqgan_fingerprint: str | None = None
    helper_of: Sequence[str] = ()

    @classmethod
    def load(cls, run_dir: Path) -> Self:
        """ValueError where the folder was not made by `dalle-lean host`."""
        path = run_dir / NAME
        if not path.is_file():
            raise UserError(f"{path} is missing: {run_dir} is no folder of a run that is hosted here")
        try:
            return cls(**read_json(path))
        except TypeError as error:
            raise UserError(f"{path} is not as this version writes it: {error}") from None

    def save(self, run_dir: Path) -> None:
        """Write host.json."""
        write_json(run_dir / NAME, dataclasses.asdict(self))

    @property
    def helpers(self) -> list[str]:
        return [name for name in self.ports if name.startswith("helper")]

    @property
    def donors(self) -> list[str]:
        return [name for name in self.ports if name.startswith("donor")]

    @property
    def leading(self) -> list[str]:
        """Those whose word on the run counts: donors, or the helper of a run that is hosted elsewhere."""
        return self.donors or self.helpers

    def address(self, run_dir: Path, name: str) -> str:
        """As others reach it."""
        return f"/ip4/{self.announce}/tcp/{self.ports[name]}/p2p/{peer_id(run_dir, name)}"

    def local_address(self, run_dir: Path, name: str) -> str:
        """As this machine's own peers reach it, whatever a router makes of the other."""
        return f"/ip4/{self.local_host}/tcp/{self.ports[name]}/p2p/{peer_id(run_dir, name)}"

    @property
    def local_host(self) -> str:
        return LOOPBACK if self.listen == EVERYWHERE else self.listen

    def is_up(self, name: str) -> bool:
        """Whether it takes connections."""
        try:
            socket.create_connection((self.local_host, self.ports[name]), timeout=CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True


def identity_path(run_dir: Path, name: str) -> Path:
    """The file of a peer's private key."""
    return run_dir / IDENTITIES / name


def make_identities(run_dir: Path, names: Iterable[str]) -> None:
    """Private keys for those who have none; nobody else on this machine can read them."""
    (run_dir / IDENTITIES).mkdir(mode=0o700, exist_ok=True)
    for name in names:
        path = identity_path(run_dir, name)
        if not path.exists():
            fresh = path.with_name(f".{name}.tmp")
            fresh.unlink(missing_ok=True)
            fresh.touch(mode=0o600)
            P2P.generate_identity(str(fresh))
            fresh.chmod(0o600)
            os.rename(fresh, path)


def peer_id(run_dir: Path, name: str) -> str:
    """What the network calls it."""
    return str(PeerID.from_identity(identity_path(run_dir, name).read_bytes()).to_base58())


def free_ports(count: int, host: str) -> list[int]:
    """Ports that nobody listens on at this moment."""
    sockets = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [taken.getsockname()[1] for taken in sockets]
    for taken in sockets:
        taken.close()
    return ports
