"""The ban list of a run: signed by the run's key, versioned, and passed on from peer to peer."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from dalle_lean.errors import UserError
from dalle_lean.io.files import locked, write_bytes
from training.swarm.admission.keys import Forged, SigningKey, read_signed

BANS = "bans"
MAX_BANS_BYTES = 2**18  # about 4,000 bans


@dataclass(frozen=True)
class Bans:
    """Banned peer ids and ids of invitations; a newer version replaces an older one."""

    version: int = 0
    banned: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def read(cls, statement: bytes, run_key: str) -> Self:
        """Parse a list, empty for an empty statement; Forged unless the run's key signed it."""
        if not statement:
            return cls()
        content = read_signed("bans", statement[: MAX_BANS_BYTES + 1], run_key)
        if not isinstance(content, dict) or type(content.get("version")) is not int:
            raise Forged("not a list of bans")
        return cls(content["version"], frozenset(map(str, content.get("banned", ()))))

    def signed(self, key: SigningKey) -> bytes:
        return key.sign("bans", {"version": self.version, "banned": sorted(self.banned)})


class WatchedFile:
    """A small file that other processes replace from time to time."""

    def __init__(self, path: Path, limit_bytes: int):
        self.path, self.limit_bytes = path, limit_bytes
        self.content, self.stamp = b"", (0, 0)

    def read(self) -> bytes:
        """The content, empty if there is no file or more than `limit_bytes`; read again only if the file changed."""
        try:
            status = self.path.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp != self.stamp:
                self.content = self.path.read_bytes() if status.st_size <= self.limit_bytes else b""
                self.stamp = stamp
        except OSError:
            self.content, self.stamp = b"", (0, 0)
        return self.content


def change_bans(run_dir: Path, key: SigningKey, subject: str, *, banned: bool) -> bool:
    """Ban or unban a peer id or an invitation; returns whether that changed anything. UserError if the list is full."""
    path = run_dir / BANS
    with locked(run_dir / f".{BANS}.lock"):
        before = Bans.read(path.read_bytes() if path.exists() else b"", key.public)
        now = before.banned | {subject} if banned else before.banned - {subject}
        if now == before.banned:
            return False
        statement = Bans(max(before.version + 1, time.time_ns() // 10**6), now).signed(key)
        if len(statement) > MAX_BANS_BYTES:
            raise UserError(f"{path} has no room for {subject}: {len(before.banned)} are banned already; unban some")
        write_bytes(path, statement)
    return True
