"""Identity files: a peer's private key, from which its peer id follows."""

import os
from pathlib import Path

from hivemind.p2p import P2P, PeerID


def make_identity(path: Path) -> None:
    """Create a private key, readable by this user only, unless there is one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.tmp")
        fresh.unlink(missing_ok=True)
        fresh.touch(mode=0o600)
        P2P.generate_identity(str(fresh))
        fresh.chmod(0o600)
        os.rename(fresh, path)


def peer_id_in(path: Path) -> str:
    return str(PeerID.from_identity(path.read_bytes()).to_base58())
