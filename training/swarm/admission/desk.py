"""The desk at which newcomers ask for a pass, and members for the next one. Helpers have one."""

import fcntl
import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from dalle_lean.io.files import read_json, write_json
from training.swarm.admission.bans import FollowedFile
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import Forged, SigningKey
from training.swarm.admission.limits import Buckets
from training.swarm.admission.passes import (
    HELPER,
    HELPER_PASS_S,
    PASS_S,
    TRAINER,
    Invite,
    Pass,
    Refused,
    decoded,
)
from training.swarm.config import ADMISSIONS

OPEN, INVITE, LIST = ADMISSIONS
OPEN_PASSES_PER_S, OPEN_PASSES_AT_ONCE = 1 / 60, 8
"""Of an open run, to newcomers from one address: a classroom behind one router comes in, a flood does not."""
MAX_ABSENCE_S = 30 * 24 * 3600.0
"""How long after the end of its pass a member may come back without a code."""
USES = "invites.json"
"""Who has come with which invitation."""
MAX_LIST_BYTES = 2**20
PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{20,80}")
FORMS = (PEER_ID, *map(re.compile, (r"[\w .'-]{0,32}", r"([0-9a-f]{64})?", r"[\w\s-]{0,1024}", r"[\w-]{0,4096}")))
"""Of an Application's fields: peer, name, key, code, current."""


@dataclass(frozen=True, kw_only=True)
class Application:
    """What a newcomer or member asks for a pass with.

    Args:
        peer: its peer id.
        name: to show to people.
        code: of an invitation; empty if it has none.
        current: the pass that it has, as `encoded`; empty if it has none.
        key: of a helper: its own public key.
    """

    peer: str
    name: str = ""
    code: str = ""
    current: str = ""
    key: str = ""

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Of JSON that anybody may have sent; Refused if it is malformed."""
        try:
            asked = cls(**json.loads(content))
            texts = (asked.peer, asked.name, asked.key, asked.code, asked.current)
            if all(form.fullmatch(text) for form, text in zip(FORMS, texts, strict=True)):
                return asked
        except (ValueError, TypeError, RecursionError):
            pass
        raise Refused("malformed")

    def to_json(self) -> bytes:
        """What `parse` takes."""
        return json.dumps(asdict(self)).encode()


class Desk:
    """Hands out passes.

    Args:
        gate: of the helper that has the desk.
        policy: OPEN, to anybody at a limited rate for each address; INVITE, to those with a code; LIST, to the peer ids
            in `peer_list`. A code is good under each of them.
        folder: where it keeps who has come with which code; the desks of one host share it.
        key_file: of the run's key, or the helper's own: then it admits trainers only.
        peer_list: a peer id on each line; `#` begins a comment.
    """

    def __init__(self, gate: Gate, policy: str, folder: Path, key_file: Path, peer_list: Path | None = None):
        self.gate, self.policy, self.folder, self.key = gate, policy, folder, SigningKey.load(key_file)
        self.is_host = self.key.public == gate.run_key
        self.peer_list = None if peer_list is None else FollowedFile(peer_list, MAX_LIST_BYTES)
        self.addresses = Buckets(OPEN_PASSES_PER_S, OPEN_PASSES_AT_ONCE)

    def admit(self, asked: Application, address: str) -> bytes:
        """The statement of a pass; Refused says why not. `address` is where the call came from."""
        if asked.peer in self.gate.current_bans().banned:
            raise Refused("banned", asked.peer)
        current, invite = self.current_pass(asked), self.invite_of(asked)
        if invite is not None and (current is None or current.invite != invite.id):
            current = self.by_invite(asked, invite)
        if current is None:
            self.check_newcomer(asked.peer, address)
            current = Pass(peer=asked.peer, role=TRAINER, name=asked.name, ends=0)
        return self.signed(current)

    def current_pass(self, asked: Application) -> Pass | None:
        """The pass to be renewed of a member, which may have been away; by a list only of those who are on it."""
        try:
            current = self.gate.genuine(asked.peer, decoded(asked.current)) if asked.current else None
        except (Forged, Refused):
            return None
        if current is None or current.ends + MAX_ABSENCE_S < time.time():
            return None
        if self.policy == LIST and not current.invite and not self.is_listed(asked.peer):
            return None
        return current

    def invite_of(self, asked: Application) -> Invite | None:
        """The invitation in a request's code, if it has one."""
        try:
            return Invite.read(asked.code, self.gate.run_key) if asked.code else None
        except Forged:
            raise Refused("forged", asked.peer) from None

    def by_invite(self, asked: Application, invite: Invite) -> Pass:
        """A pass for whom the host has invited."""
        if invite.id in self.gate.current_bans().banned:
            raise Refused("banned", asked.peer)
        if invite.ends < time.time():
            raise Refused("ended", asked.peer)
        if invite.role != TRAINER and not self.is_host:
            raise Refused("host only", asked.peer)
        self.count_use(invite, asked.peer)
        key = asked.key if invite.role == HELPER else ""
        name = invite.name or asked.name
        return Pass(peer=asked.peer, role=invite.role, name=name, ends=0, invite=invite.id, key=key)

    def count_use(self, invite: Invite, peer: str) -> None:
        """Note that a machine comes with an invitation; Refused if that has admitted all it is for."""
        path = self.folder / USES
        with open(self.folder / f".{USES}.lock", "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            uses: dict[str, list[str]] = read_json(path) if path.exists() else {}
            came = uses.setdefault(invite.id, [])
            if peer in came:
                return
            if len(came) >= invite.uses:
                raise Refused("used up", peer)
            came.append(peer)
            write_json(path, uses)

    def check_newcomer(self, peer: str, address: str) -> None:
        """Refused unless the run's policy admits somebody without a code."""
        if self.policy == INVITE:
            raise Refused("no code", peer)
        if self.policy == LIST and not self.is_listed(peer):
            raise Refused("not listed", peer)
        if self.policy == OPEN:
            self.addresses.take(address)

    def is_listed(self, peer: str) -> bool:
        """Whether the host's list has this peer id."""
        lines = b"" if self.peer_list is None else self.peer_list.read()
        return any(line.split("#")[0].strip() == peer for line in lines.decode(errors="replace").splitlines())

    def signed(self, given: Pass) -> bytes:
        """The pass from now on, signed."""
        ends = time.time() + (PASS_S if given.role == TRAINER else HELPER_PASS_S)
        if self.is_host:
            return replace(given, ends=int(ends), issuer="").signed(self.key)
        own = self.gate.own_pass()
        if given.role != TRAINER or own is None or own.key != self.key.public or own.ends < time.time():
            raise Refused("host only", given.peer)
        helped = replace(given, ends=int(min(ends, own.ends)), issuer=own.peer)
        return helped.signed(self.key, self.gate.shown)
