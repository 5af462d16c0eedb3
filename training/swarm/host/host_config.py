"""host.json: names, addresses and identities of the host's own peers."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from training.swarm.network.addresses import EVERYWHERE, LOOPBACK, is_listening, make_identity, peer_id_in

HOST_JSON = "host.json"
IDENTITIES = "identities"


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """The content of host.json, which concerns this machine only.

    Args:
        ports: by peer; helpers first.
        listen: the IPv4 address that all of them listen on.
        announce: the IPv4 address at which others reach this machine.
        vqgan: folder of the VQGAN that goes into the checkpoints' model folders.
        vqgan_fingerprint: of the VQGAN that made the codes.
        publish: where checkpoints are published; empty or None for nowhere.
        peer_list: file of the peer ids that the run admits, if it admits by a list.
        page: options of `dalle-lean monitor` for the run's page; empty for no page.
        helper_of: addresses of the run for which this machine runs a helper; empty if it hosts the run.
    """

    ports: dict[str, int]
    listen: str = EVERYWHERE
    announce: str = LOOPBACK
    vqgan: str | None = None
    vqgan_fingerprint: str | None = None
    publish: str | None = None
    peer_list: str | None = None
    page: Sequence[str] = ()
    helper_of: Sequence[str] = ()

    @classmethod
    def load(cls, run_dir: Path) -> Self:
        """Read host.json; ValueError unless `dalle-lean host` has written it."""
        path = run_dir / HOST_JSON
        if not path.is_file():
            raise UserError(f"{path} is missing: {run_dir} is not the folder of a run hosted here")
        try:
            content = {**read_json(path)}
            content.pop("init", None)  # of an older version
            return cls(**content)
        except TypeError as error:
            raise UserError(f"{path} was not written by this version: {error}") from None

    def save(self, run_dir: Path) -> None:
        """Write host.json, and the missing private keys of its peers."""
        make_identities(run_dir, self.ports)
        write_json(run_dir / HOST_JSON, dataclasses.asdict(self))

    @property
    def helpers(self) -> list[str]:
        return [name for name in self.ports if role_in(name) == "helper"]

    @property
    def donors(self) -> list[str]:
        return [name for name in self.ports if role_in(name) == "donor"]

    @property
    def leading(self) -> list[str]:
        """The peers that report the run's progress: donors, or the helper of a run hosted elsewhere."""
        return self.donors or self.helpers

    def address(self, run_dir: Path, name: str) -> str:
        """The address at which others reach this peer."""
        return f"/ip4/{self.announce}/tcp/{self.ports[name]}/p2p/{peer_id(run_dir, name)}"

    def local_address(self, run_dir: Path, name: str) -> str:
        """The address for peers on this machine, since a router may not loop the public address back."""
        return f"/ip4/{self.local_host}/tcp/{self.ports[name]}/p2p/{peer_id(run_dir, name)}"

    @property
    def local_host(self) -> str:
        return LOOPBACK if self.listen == EVERYWHERE else self.listen

    def is_up(self, name: str) -> bool:
        """Whether this peer accepts connections."""
        return is_listening(self.local_host, self.ports[name])


def role_in(name: str) -> str:
    """The role of a peer of this name: "helper" or "donor"."""
    return name.partition("-")[0]


def identity_path(run_dir: Path, name: str) -> Path:
    return run_dir / IDENTITIES / name


def make_identities(run_dir: Path, names: Iterable[str]) -> None:
    """Create missing private keys, readable only by this user."""
    (run_dir / IDENTITIES).mkdir(mode=0o700, exist_ok=True)
    for name in names:
        make_identity(identity_path(run_dir, name))


def peer_id(run_dir: Path, name: str) -> str:
    return peer_id_in(identity_path(run_dir, name))
