"""The gate of a peer: whom it lets in, by their passes and the bans."""

import multiprocessing as mp
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from training.swarm.admission.bans import MAX_BANS_BYTES, Bans, FollowedFile, write_statement
from training.swarm.admission.keys import Forged
from training.swarm.admission.limits import MAX_REMEMBERED
from training.swarm.admission.passes import MAX_PASS_BYTES, Pass, Refused


class Gate:
    """Whom a peer lets in. Each of its processes has a copy; files and the count of refusals are common to all.

    Args:
        run_key: public half of the run's key.
        pass_file: this peer's own pass.
        bans_file: the newest list of bans that it knows.
    """

    def __init__(self, run_key: str, pass_file: Path, bans_file: Path):
        self.run_key = run_key
        self.own, self.bans_file = FollowedFile(pass_file, MAX_PASS_BYTES), FollowedFile(bans_file, MAX_BANS_BYTES)
        self.bans, self.bans_statement, self.bans_read = Bans(), b"", b""
        self.read_passes: OrderedDict[bytes, Pass] = OrderedDict()
        self.admitted: OrderedDict[str, Pass] = OrderedDict()
        """The pass that each peer has last shown to this process."""
        self._refused = mp.Value("q", 0)

    @property
    def shown(self) -> bytes:
        """This peer's own pass as it shows it to others; empty if it has none."""
        return self.own.read()

    @property
    def refused(self) -> int:
        """Calls refused by all of this peer's processes."""
        return int(self._refused.value)

    def count_refusal(self) -> None:
        """Count a call that was refused."""
        with self._refused.get_lock():
            self._refused.value += 1

    def own_pass(self) -> Pass | None:
        """This peer's pass, even if it has ended; None if it has none of this run."""
        try:
            return Pass.read(self.own.read(now=True), self.run_key)
        except Forged:
            return None

    def check(self, peer: str, statement: bytes) -> Pass:
        """The pass that the peer shows; Refused unless it lets this peer in now."""
        shown = self.genuine(peer, statement)
        if shown.ends < time.time():
            raise Refused("ended")
        remember(self.admitted, peer, shown)
        return shown

    def genuine(self, peer: str, statement: bytes) -> Pass:
        """The pass that the peer shows, which may have ended; Refused if it is not its own, or banned."""
        if not statement:
            raise Refused("no pass")
        shown = self.read_passes.get(statement)
        if shown is None:
            try:
                shown = Pass.read(statement, self.run_key)
            except Forged:
                raise Refused("forged") from None
            remember(self.read_passes, statement, shown)
        if shown.peer != peer:
            raise Refused("other peer")
        if self.bans_by(shown):
            raise Refused("banned")
        return shown

    def known(self, peer: str) -> Pass | None:
        """The pass that the peer has shown to this process, if it would still let it in."""
        shown = self.admitted.get(peer)
        if shown is None or shown.ends < time.time() or self.bans_by(shown):
            return None
        return shown

    def check_ban(self, peer: str) -> None:
        """Refused if the peer is banned, as far as this process knows it."""
        shown = self.admitted.get(peer)
        if peer in self.current_bans().banned or (shown is not None and self.bans_by(shown)):
            raise Refused("banned")

    def bans_by(self, shown: Pass) -> bool:
        """Whether a pass' peer, invitation or helper is banned."""
        return not self.current_bans().banned.isdisjoint({shown.peer, shown.invite, shown.issuer} - {""})

    def current_bans(self, *, now: bool = False) -> Bans:
        """The newest list in the file, which is looked at in any case if `now`."""
        statement = self.bans_file.read(now=now)
        if statement != self.bans_read:
            self.bans_read = statement
            self.take_if_newer(statement)
        return self.bans

    def take_if_newer(self, statement: bytes) -> bool:
        """Go by this list from now on, if the run's key signed it and it is newer; returns whether it is."""
        try:
            bans = Bans.read(statement, self.run_key)
        except Forged:
            return False
        if bans.version <= self.bans.version:
            return False
        self.bans, self.bans_statement = bans, statement
        return True

    def learn_bans(self, statement: bytes) -> None:
        """Keep a list that another peer sent, for all processes of this one, if it is newer."""
        self.current_bans(now=True)
        if self.take_if_newer(statement):
            write_statement(self.bans_file.path, statement)

    @property
    def own_refusal(self) -> str:
        """In one sentence why others do not let this peer in; empty while they do."""
        own = self.own_pass()
        if own is None or own.ends < time.time():
            return str(Refused("ended"))
        return str(Refused("banned")) if self.bans_by(own) else ""


def remember(kept: OrderedDict[Any, Pass], key: Any, shown: Pass) -> None:
    """Keep a pass, and forget the one that was not needed for longest if there are MAX_REMEMBERED."""
    kept[key] = shown
    kept.move_to_end(key)
    if len(kept) > MAX_REMEMBERED:
        kept.popitem(last=False)


def gate_of(dht: Any) -> Gate | None:
    """The gate of a node; None in a run without a key."""
    return getattr(dht, "gate", None)
