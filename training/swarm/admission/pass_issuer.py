"""Issues passes to newcomers and renews those of members; each helper runs a PassIssuer."""

import json
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from dalle_lean.io.files import locked, read_json, write_json
from training.swarm.admission.bans import WatchedFile
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import Forged, SigningKey
from training.swarm.admission.limits import Buckets
from training.swarm.admission.passes import HELPER, MAX_SPONSORS, TRAINER, VALIDITY_S, Invite, Pass, Refused, decoded
from training.swarm.config import ADMISSIONS

OPEN, INVITE, LIST = ADMISSIONS
OPEN_PASSES_PER_S, OPEN_PASSES_AT_ONCE = 1 / 60, 8
"""In an open run, to newcomers from one address: enough for a classroom behind one router, not for a flood."""
MAX_ABSENCE_S = 30 * 24 * 3600.0  # how long after its pass has expired a member can still renew it
USES = "invites.json"  # the peers that joined with each invitation
MAX_LIST_BYTES = 2**20
PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{20,80}")
FORMS = {
    "peer": PEER_ID,
    "name": re.compile(r"[\w .'-]{0,32}"),
    "code": re.compile(r"[\w\s-]{0,1024}"),
    "current": re.compile(r"[\w-]{0,4096}"),
    "key": re.compile(r"([0-9a-f]{64})?"),
}
"""Patterns of an Application's fields."""


@dataclass(frozen=True, kw_only=True)
class Application:
    """A newcomer's or member's request for a pass.

    Args:
        peer: its peer id.
        name: its display name.
        code: of an invitation; empty without one.
        current: its current pass, `encoded`; empty without one.
        key: a helper's public key.
    """

    peer: str
    name: str = ""
    code: str = ""
    current: str = ""
    key: str = ""

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Parse untrusted JSON; Refused if it is malformed."""
        try:
            asked = cls(**json.loads(content))
            if all(form.fullmatch(getattr(asked, name)) for name, form in FORMS.items()):
                return asked
        except (ValueError, TypeError, RecursionError):
            pass
        raise Refused("malformed")

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class PassIssuer:
    """Issues and renews passes.

    Args:
        gate: of the helper that runs it.
        policy: OPEN admits anybody, at a limited rate per address; INVITE, peers with a code; LIST, the peer ids in
            `peer_list`. Codes work under every policy.
        folder: records who joined with which code; the helpers of one host share it.
        key_file: of the run's key, or the helper's own, which admits trainers only.
        peer_list: one peer id per line; `#` starts a comment.
    """

    def __init__(self, gate: Gate, policy: str, folder: Path, key_file: Path, peer_list: Path | None = None):
        self.gate, self.policy, self.folder, self.key = gate, policy, folder, SigningKey.load(key_file)
        self.is_host = self.key.public == gate.run_key
        self.peer_list = None if peer_list is None else WatchedFile(peer_list, MAX_LIST_BYTES)
        self.addresses = Buckets(OPEN_PASSES_PER_S, OPEN_PASSES_AT_ONCE)

    def admit(self, asked: Application, address: str) -> bytes:
        """Issue a signed pass; Refused says why not. `address` is the caller's IP address."""
        if asked.peer in self.gate.current_bans().banned:
            raise Refused("banned", asked.peer)
        current = self.current_pass(asked)
        try:
            invite = Invite.read(asked.code, self.gate.run_key) if asked.code else None
        except Forged:
            raise Refused("forged", asked.peer) from None
        if invite is not None and (current is None or current.invite != invite.id):
            current = self.by_invite(asked, invite)
        if current is None:
            self.check_newcomer(asked.peer, address)
            current = Pass(peer=asked.peer, role=TRAINER, name=asked.name, ends=0)
        return self.signed(current)

    def current_pass(self, asked: Application) -> Pass | None:
        """The pass to renew, even if it expired a while ago; under LIST only if the member is still listed."""
        try:
            current = self.gate.verify(asked.peer, decoded(asked.current))
        except (Forged, Refused):
            return None
        if current.ends + MAX_ABSENCE_S < time.time() or len(current.sponsors) > MAX_SPONSORS:
            return None
        if self.policy == LIST and not current.invite and not self.is_listed(asked.peer):
            return None
        return current

    def by_invite(self, asked: Application, invite: Invite) -> Pass:
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
        """Record that a peer joins with an invitation; Refused if the invitation is used up."""
        path = self.folder / USES
        with locked(self.folder / f".{USES}.lock"):
            uses: dict[str, list[str]] = read_json(path) if path.exists() else {}
            joined = uses.setdefault(invite.id, [])
            if peer in joined:
                return
            if len(joined) >= invite.uses:
                raise Refused("used up", peer)
            joined.append(peer)
            write_json(path, uses)

    def check_newcomer(self, peer: str, address: str) -> None:
        """Refused unless the run's policy admits a newcomer without a code."""
        if self.policy == INVITE:
            raise Refused("no code", peer)
        if self.policy == LIST and not self.is_listed(peer):
            raise Refused("not listed", peer)
        if self.policy == OPEN:
            self.addresses.take(address)

    def is_listed(self, peer: str) -> bool:
        lines = b"" if self.peer_list is None else self.peer_list.read()
        return any(line.split("#")[0].strip() == peer for line in lines.decode(errors="replace").splitlines())

    def signed(self, given: Pass) -> bytes:
        """Sign a pass that is valid from now on."""
        ends = time.time() + VALIDITY_S[given.role]
        if self.is_host:
            return replace(given, ends=int(ends), issuer="").signed(self.key)
        own = self.gate.own_pass()
        if given.role != TRAINER or own is None or own.key != self.key.public or own.ends < time.time():
            raise Refused("host only", given.peer)
        helped = replace(given, ends=int(min(ends, own.ends)), issuer=own.peer)
        return helped.signed(self.key, self.gate.own_statement)
