"""The commands `dalle-lean invite`, `ban` and `unban`: whom a run's host admits."""

import re
import secrets
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dalle_lean.errors import UserError
from dalle_lean.terminal import begin_loading, echo
from training.commands.options import RunDir

if TYPE_CHECKING:
    from training.swarm.admission.keys import SigningKey
    from training.swarm.admission.passes import Invite

DAY_S = 24 * 3600
Subject = Annotated[
    str, typer.Argument(metavar="PEER_OR_CODE", help="Peer id of a machine, or the code or id of an invitation.")
]


def invite(
    run_dir: RunDir,
    name: Annotated[str | None, typer.Option(help="Name of the volunteer, stored in the pass.")] = None,
    uses: Annotated[int, typer.Option(help="Machines that may join with it.", min=1, max=10_000)] = 1,
    days: Annotated[float, typer.Option(help="Days until it expires.", min=0.01, max=3650)] = 7.0,
    role: Annotated[str, typer.Option(help="trainer, or helper (a machine that runs `host --helper-of`).")] = "trainer",
) -> None:
    """Invite volunteers to a run: print a code and the command to join with. Works whether or not `dalle-lean host` is
    running."""
    begin_loading()
    from training.swarm.admission.passes import HELPER, TRAINER
    from training.swarm.config import read_settings
    from training.swarm.observe.peer_metrics import check_user_name

    if role not in (TRAINER, HELPER):
        raise UserError(f"--role {role}: must be {TRAINER} or {HELPER}")
    if name is not None:
        check_user_name(name)
    key = run_key_of(run_dir)
    ends = int(time.time() + days * DAY_S)
    given, code = new_invite(key, uses=uses, ends=ends, role=role, name=name or "")
    swarm = read_settings(run_dir).swarm
    until = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(ends))
    echo(f"invitation {given.id}, for {uses} {role}{'s' * (uses > 1)} until {until}; keep its code secret.")
    echo(f"To revoke it: dalle-lean ban {shlex.quote(str(run_dir))} {given.id}. To join:")
    if role == HELPER:
        echo(f"    dalle-lean host RUN_DIR --helper-of {swarm.addresses[0]} --announce ITS_ADDRESS --code {code}")
    else:
        echo(f"    dalle-lean join {swarm.join_arguments(swarm.addresses)} --code {code}")


def new_invite(key: "SigningKey", **terms: Any) -> tuple["Invite", str]:
    """A new invitation and its code, which never begins with "-": `ban` would take it for an option."""
    from training.swarm.admission.passes import Invite

    while True:
        given = Invite(id=secrets.token_hex(4), **terms)
        if not (code := given.code(key)).startswith("-"):
            return given, code


def ban(run_dir: RunDir, subject: Subject) -> None:
    """Ban a machine, or an invitation and all who joined with it; takes effect within seconds while the host runs."""
    begin_loading()
    subject, changed = change(run_dir, subject, banned=True)
    echo(
        f"{subject} is banned; to undo that: dalle-lean unban {shlex.quote(str(run_dir))} {subject}"
        if changed
        else f"{subject} is already banned"
    )


def unban(run_dir: RunDir, subject: Subject) -> None:
    """Lift a ban."""
    begin_loading()
    subject, changed = change(run_dir, subject, banned=False)
    echo(f"{subject} is no longer banned" if changed else f"{subject} is not banned")


def change(run_dir: Path, subject: str, *, banned: bool) -> tuple[str, bool]:
    """Ban or unban a peer id or an invitation, given by its code or the id that `invite` prints.

    Returns the peer id or the invitation's id, and whether anything changed.
    """
    from training.swarm.admission.bans import change_bans
    from training.swarm.admission.keys import Forged
    from training.swarm.admission.pass_issuer import PEER_ID
    from training.swarm.admission.passes import Invite

    key = run_key_of(run_dir)
    if not PEER_ID.fullmatch(subject) and not re.fullmatch(r"[0-9a-f]{8}", subject):
        try:
            subject = Invite.read(subject, key.public).id
        except Forged:
            raise UserError(f"{subject!r} is neither a peer id (Qm...) nor a code or invitation of this run") from None
    return subject, change_bans(run_dir, key, subject, banned=banned)


def run_key_of(run_dir: Path) -> "SigningKey":
    """Load the run's key; ValueError if the folder lacks it."""
    from training.swarm.admission.keys import SigningKey
    from training.swarm.host.host_gate import run_key_file
    from training.swarm.host.run_setup import hosted_settings

    path, settings = run_key_file(run_dir), hosted_settings(run_dir)
    if not settings.swarm.run_key:
        raise UserError(f"the run in {run_dir} was started without a key: it admits anyone who has its address")
    if not path.exists():
        raise UserError(f"{path} is missing: run this on the machine that hosts the run")
    key = SigningKey.load(path)
    if key.public != settings.swarm.run_key:
        raise UserError(f"{path} is not the key of the run in {run_dir}; restore the run's own")
    return key
