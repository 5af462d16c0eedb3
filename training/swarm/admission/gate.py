"""The gate of a peer: decides by passes and bans which peers it communicates with."""

import multiprocessing as mp
import time
from collections import OrderedDict
from pathlib import Path

from dalle_lean.io.files import write_bytes
from training.swarm.admission.bans import MAX_BANS_BYTES, Bans, WatchedFile
from training.swarm.admission.keys import Forged
from training.swarm.admission.limits import MAX_REMEMBERED
from training.swarm.admission.passes import MAX_PASS_BYTES, Pass, Refused


class Gate:
    """A peer's admission control. Each of its processes has a copy; they share the files and the count of refusals.

    Args:
        run_key: the run's public key.
        pass_file: this peer's own pass.
        bans_file: the newest ban list that it knows.
    """

    def __init__(self, run_key: str, pass_file: Path, bans_file: Path):
        self.run_key = run_key
        self.own, self.bans_file = WatchedFile(pass_file, MAX_PASS_BYTES), WatchedFile(bans_file, MAX_BANS_BYTES)
        self.bans, self.bans_statement, self.bans_read = Bans(), b"", b""
        self.admitted: OrderedDict[str, Pass] = OrderedDict()
        """The latest pass that each peer has shown to this process."""
        self._refused = mp.Value("q", 0)

    @property
    def own_statement(self) -> bytes:
        """This peer's own pass, signed, as it shows it to others; empty if it has none."""
        return self.own.read()

    @property
    def refused(self) -> int:
        """Calls that this peer's processes have refused."""
        return int(self._refused.value)

    def count_refusal(self) -> None:
        with self._refused.get_lock():
            self._refused.value += 1

    def own_pass(self) -> Pass | None:
        """This peer's own pass, even if it has expired; None without a pass for this run."""
        try:
            return Pass.read(self.own.read(), self.run_key)
        except Forged:
            return None

    @property
    def has_pass(self) -> bool:
        """Whether this peer has a pass that has not expired."""
        own = self.own_pass()
        return own is not None and own.ends >= time.time()

    def check(self, peer: str, statement: bytes) -> Pass:
        """The pass that the peer shows; Refused unless it is valid now."""
        shown = self.verify(peer, statement)
        if shown.ends < time.time():
            raise Refused("ended")
        self.admitted[peer] = shown
        self.admitted.move_to_end(peer)
        if len(self.admitted) > MAX_REMEMBERED:
            self.admitted.popitem(last=False)
        return shown

    def verify(self, peer: str, statement: bytes) -> Pass:
        """The pass that the peer shows, even if it has expired; Refused if forged, another peer's or banned."""
        if not statement:
            raise Refused("no pass")
        try:
            shown = Pass.read(statement, self.run_key)
        except Forged:
            raise Refused("forged") from None
        if shown.peer != peer:
            raise Refused("other peer")
        if self.is_banned(shown):
            raise Refused("banned")
        return shown

    def is_admitted(self, peer: str) -> bool:
        """Whether the peer has shown this process a pass that is still valid."""
        shown = self.admitted.get(peer)
        return shown is not None and shown.ends >= time.time() and not self.is_banned(shown)

    def check_ban(self, peer: str) -> None:
        """Refused if the peer is banned, as far as this process knows."""
        shown = self.admitted.get(peer)
        if peer in self.current_bans().banned or (shown is not None and self.is_banned(shown)):
            raise Refused("banned")

    def is_banned(self, shown: Pass) -> bool:
        """Whether a pass's peer or invitation, or a helper that signed it or its invitation, is banned."""
        return not self.current_bans().banned.isdisjoint({shown.peer, shown.invite, *shown.sponsors} - {""})

    def current_bans(self) -> Bans:
        """The newest ban list."""
        statement = self.bans_file.read()
        if statement != self.bans_read:
            self.bans_read = statement
            self.take_if_newer(statement)
        return self.bans

    def take_if_newer(self, statement: bytes) -> bool:
        """Adopt a list if the run's key signed it and it is newer; returns whether it was adopted."""
        try:
            bans = Bans.read(statement, self.run_key)
        except Forged:
            return False
        if bans.version <= self.bans.version:
            return False
        self.bans, self.bans_statement = bans, statement
        return True

    def learn_bans(self, statement: bytes) -> None:
        """Save a list from another peer, for all processes of this one, if it is newer."""
        self.current_bans()
        if self.take_if_newer(statement):
            write_bytes(self.bans_file.path, statement)

    @property
    def own_refusal(self) -> str:
        """Why others refuse this peer, in one sentence; empty while they admit it."""
        own = self.own_pass()
        if own is None or own.ends < time.time():
            return str(Refused("ended"))
        return str(Refused("banned")) if self.is_banned(own) else ""
