"""Passes and invitations, signed by the run's key or by a helper that has a pass of that key.

A pass names a peer id, which libp2p proves at each connection: a copied pass is useless.
"""

import base64
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any, Self

from dalle_lean.errors import UserError
from training.swarm.admission.keys import Forged, SigningKey, read_signed, read_unverified

TRAINER, HELPER, DONOR = ROLES = ("trainer", "helper", "donor")
MAX_PASS_BYTES = 2048
MAX_SPONSORS = 16  # of a pass that is renewed; with more, its holder is a newcomer again
PASS_S = 24 * 3600.0
HELPER_PASS_S = 14 * 24 * 3600.0  # longer: only the host renews it, and the host may be offline
VALIDITY_S = {TRAINER: PASS_S, HELPER: HELPER_PASS_S, DONOR: HELPER_PASS_S}
REFUSALS = {
    "no pass": ("this machine has no pass for this run", "join it by its address"),
    "forged": ("the pass or code does not belong to this run", "ask the run's host for a code, and copy all of it"),
    "other peer": ("the pass belongs to another machine", "join the run by its address to get one for this machine"),
    "ended": ("the pass or code has expired", "ask the run's host for a new one"),
    "banned": ("the host has banned this machine, or the code that it joined with", "ask the run's host why"),
    "busy": ("too many calls or newcomers right now", "try again in a few minutes, or ask the run's host for a code"),
    "no code": (
        "the run admits only machines that its host has invited",
        "ask the host for a code and pass it with --code",
    ),
    "used up": ("the code has admitted as many machines as it allows", "ask the run's host for another"),
    "not listed": ("the run admits only machines on its host's list", "send the host this machine's peer id: {peer}"),
    "host only": ("only the host can admit a helper, and it is offline", "try again when it is back"),
    "malformed": ("the helper does not understand this version's request", "install the run's version of dalle-lean"),
}
"""By reason: why a peer is not admitted, and what to do about it."""


class Refused(UserError):
    """A peer is not admitted, for one of the reasons in REFUSALS; `peer` is this machine's peer id."""

    def __init__(self, reason: str, peer: str = ""):
        self.reason = reason if reason in REFUSALS else "malformed"
        self.found, fix = REFUSALS[self.reason]
        self.fix = fix.format(peer=peer)
        super().__init__(f"{self.found}; {self.fix}")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The content of a pass.

    Args:
        peer: the holder's peer id.
        role: TRAINER, HELPER or DONOR.
        name: the holder's display name.
        ends: seconds since 1970.
        invite: id of the invitation that it was issued for; empty without one.
        key: a helper's public key, which signs the passes of trainers.
        issuer: the peer id of the helper that signed it; empty if the run's key did.
        sponsors: peer ids and invitations of the helpers that signed it or an earlier pass of its holder. A ban of one
            of them bans the holder.
    """

    peer: str
    role: str
    name: str
    ends: int
    invite: str = ""
    key: str = ""
    issuer: str = ""
    sponsors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.sponsors, list | tuple):
            raise Forged("not a pass")
        object.__setattr__(self, "sponsors", tuple(self.sponsors))
        texts = (self.peer, self.name, self.invite, self.key, self.issuer, *self.sponsors)
        if not all(isinstance(text, str) for text in texts) or self.role not in ROLES or type(self.ends) is not int:
            raise Forged("not a pass")

    @classmethod
    @lru_cache(maxsize=4096)  # holds valid passes only
    def read(cls, statement: bytes, run_key: str) -> Self:
        """Parse a pass; Forged unless the run's key signed it, or a helper with a pass signed by the run's key."""
        if not 0 < len(statement) <= MAX_PASS_BYTES:
            raise Forged("not a pass")
        content = read_unverified(statement)
        try:
            helper = content.pop("helper", None)
            given = cls(**content)
        except (AttributeError, TypeError):  # no dictionary, or one of other fields
            raise Forged("not a pass") from None
        if helper is None:
            read_signed("pass", statement, run_key)
            return given
        signer = cls.read(decoded(helper), run_key)
        read_signed("pass", statement, signer.key)
        if signer.role != HELPER or given.role != TRAINER or given.issuer != signer.peer or given.ends > signer.ends:
            raise Forged("a helper admits trainers only, and for no longer than itself")
        sponsors = dict.fromkeys((*given.sponsors, signer.peer, signer.invite))
        return replace(given, sponsors=tuple(filter(None, sponsors)))

    def signed(self, key: SigningKey, helper: bytes = b"") -> bytes:
        """The signed statement; `helper` is the pass of the helper whose key signs, empty for the run's key."""
        content = {name: value for name, value in asdict(self).items() if value != ()}
        return key.sign("pass", {**content, "helper": encoded(helper)} if helper else content)


@dataclass(frozen=True, kw_only=True)
class Invite:
    """The content of a code: `uses` machines may join with it until `ends`, in seconds since 1970."""

    id: str
    uses: int
    ends: int
    role: str = TRAINER
    name: str = ""

    @classmethod
    def read(cls, code: str, run_key: str) -> Self:
        """Parse a code; Forged unless the run's key signed it."""
        content = read_signed("invite", decoded(code), run_key)
        return cls(**dict(zip(("id", "uses", "ends", "role", "name"), content, strict=True)))

    def code(self, key: SigningKey) -> str:
        """The code: letters, digits, hyphens and underscores."""
        return encoded(key.sign("invite", [self.id, self.uses, self.ends, self.role, self.name]))


def may_be_code(text: str) -> bool:
    """Whether a text can be the code of some run; that run's key tells whether it is."""
    try:
        content = read_unverified(decoded(text))
    except Forged:
        return False
    return isinstance(content, list) and len(content) == len(fields(Invite))


def encoded(content: bytes) -> str:
    """URL-safe Base64 without padding."""
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def decoded(text: Any) -> bytes:
    """The bytes of `encoded`; Forged if the text is not Base64."""
    try:
        return base64.urlsafe_b64decode(text.strip() + "=" * (-len(text.strip()) % 4))
    except (AttributeError, ValueError):
        raise Forged("not a statement") from None
