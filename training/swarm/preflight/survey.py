"""All checks of a machine before it joins a run, in the order in which they are shown."""

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hivemind
import torch

from dalle_lean.devices import pick_device
from dalle_lean.errors import UserError
from dalle_lean.io.files import read_text
from dalle_lean.io.remote_io import Patience
from training.data.catalog import ShardSet
from training.run.folder import busy, is_locked, run_folder
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import Forged
from training.swarm.admission.pass_issuer import OPEN
from training.swarm.admission.passes import Invite, Refused, may_be_code
from training.swarm.admission.service import enter_by_pass
from training.swarm.config import SWARM_TOML, SwarmSection, SwarmSettings, read_settings
from training.swarm.network.addresses import EVERYWHERE, addresses_of, announced_address, free_ports, port_is_free
from training.swarm.network.bootstrap_service import (
    TOKENIZER,
    RunFiles,
    Unanswered,
    fetch_run,
    first_answer,
    is_reachable,
    remote_time,
)
from training.swarm.network.dht import open_dht
from training.swarm.observe.peer_metrics import check_user_name
from training.swarm.preflight import checks
from training.swarm.preflight.batch_size import BatchPlan, free_memory, plan_batch, state_bytes
from training.swarm.preflight.checks import OK, PROBLEM, WARNING, Check

NAME = "name"
"""File in the folder: the display name under which this machine last took part."""


@dataclass(frozen=True)
class JoinOptions:
    """A volunteer's choices, in the order of the command line; None chooses automatically.

    Args:
        data: where this machine reads the run's shards.
        folder: stores this peer's identity and position in the data.
        listen: port to accept connections on.
        client: accept no connections.
        announce: public addresses at which others reach this machine: an IPv4 address, or /ip4/ADDRESS/tcp/PORT if
            another port is forwarded.
        batch_size: samples between two reports to the others.
        device, precision: as in training alone.
        user: display name on the leaderboard.
        code: of the host's invitation, the first time.
    """

    data: str | None = None
    folder: Path | None = None
    listen: int | None = None
    client: bool = False
    announce: Sequence[str] = ()
    batch_size: int | None = None
    device: str = "auto"
    precision: str | None = None
    user: str | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        if self.client and (self.listen is not None or self.announce):
            raise UserError("--client accepts no connections: leave out --listen and --announce")
        if self.announce and self.listen is None:
            raise UserError("--announce needs --listen with the port that it announces")
        _ = self.announced
        if self.user is not None:
            check_user_name(self.user)
        if self.code is not None and not may_be_code(self.code):
            raise UserError(
                f"--code {self.code[:40]}: not a code; copy all of what `dalle-lean invite` printed, or leave it out "
                "for a run that anyone may join"
            )

    @property
    def announced(self) -> list[str]:
        """The announced addresses with their ports; UserError if one is none."""
        return [announced_address(address, self.listen or 0) for address in self.announce]

    @property
    def reach(self) -> str:
        """ "client", "listen", or "auto": listen if a helper can connect."""
        return "client" if self.client else "listen" if self.listen is not None else "auto"


@dataclass(kw_only=True)
class Survey:
    """The findings that joining needs; what a problem leaves unknown is None."""

    checks: list[Check]
    run: RunFiles
    addresses: tuple[str, ...]
    folder: Path
    device: torch.device
    batch: BatchPlan | None = None
    shards: ShardSet | None = None
    port: int = 0
    """To listen on; 0 in client mode."""
    gate: Gate | None = None
    """With this machine's pass, in a run with a key."""

    @property
    def problems(self) -> list[Check]:
        """The checks that prevent this machine from joining."""
        return [check for check in self.checks if check.level == PROBLEM]


def survey(targets: Sequence[str], options: JoinOptions, on_check: Callable[[Check], None]) -> Survey:
    """Check this machine for the run that `targets` names: addresses of its helpers, or its swarm.toml.

    Args:
        on_check: called with each check as soon as it is done.

    Raises ValueError if no helper serves the run's files, the port is taken, or another process uses the folder.
    """
    addresses, run = read_targets(targets)
    choose_folder(run, options)
    done: list[Check] = []

    def report(check: Check) -> None:
        done.append(check)
        on_check(check)

    report(checks.check_versions(checks.installed_versions()))
    device = pick_device(options.device)
    report(checks.check_device(device))
    port = 0 if options.client else options.listen or free_ports(1)[0]
    with temporary_node(addresses, options, port) as (dht, reason):
        theirs = first_answer(dht, addresses, fetch_run)
        run = run or theirs
        if run is None:
            raise UserError(
                reason or f"no helper at {', '.join(targets)} serves the run's files; ask its host for swarm.toml"
            )
        settings, folder = run.settings, choose_folder(run, options)
        assert folder is not None
        found = Survey(checks=done, run=run, addresses=addresses, folder=folder, device=device)
        check_code(settings.swarm, options.code)
        if renamed := check_name(folder, options.user):
            report(renamed)
        check_resources(found, settings, options, report)
        report(check_helpers(dht, reason))
        offset_s = first_answer(dht, addresses, lambda node, at: remote_time(node, at) - time.time())
        report(checks.check_clock(offset_s))
        reachable = None
        if not options.client:
            reachable = first_answer(dht, addresses, lambda node, at: is_reachable(node, at, port))
        report(checks.check_reach(mode=options.reach, port=port, reachable=reachable, announced=bool(options.announce)))
        found.port = port if options.reach == "listen" or reachable else 0
        sha256 = hashlib.sha256(run.tokenizer).hexdigest()
        report(checks.check_fingerprint(settings, theirs.settings if theirs else None, sha256))
        if settings.swarm.run_key and dht is not None and not found.problems:
            report(check_admission(found, settings, options, dht))
    return found


def read_targets(targets: Sequence[str]) -> tuple[tuple[str, ...], RunFiles | None]:
    """The addresses, and the run's files if `targets` names them; ValueError if it names neither."""
    if addresses := addresses_of(targets):
        return addresses, None
    files = read_files(Path(targets[0]))
    return files.settings.swarm.addresses, files


def read_files(path: Path) -> RunFiles:
    """A run's files, from its swarm.toml or the folder of that; ValueError if one is missing or malformed."""
    path = path / SWARM_TOML if path.is_dir() else path
    settings, tokenizer = read_settings(path), path.with_name(TOKENIZER)
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer} is missing: put it beside {path.name}, or join by the run's address")
    return RunFiles(settings, path.read_text(encoding="utf-8"), tokenizer.read_bytes())


def ranks_here() -> int:
    """Number of processes that torchrun started for this peer."""
    return int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def temporary_node(addresses: Sequence[str], options: JoinOptions, port: int) -> Iterator[tuple[Any, str]]:
    """A DHT node with a temporary identity, and ""; None and the reason if no address answers.

    Raises ValueError if the port is taken.
    """
    if port and not port_is_free(port):
        raise UserError(f"--listen {port}: another program uses this port; end it, or choose another port")
    dht, reason = None, "the run names no helper's address"
    if addresses:
        try:
            dht = open_dht(
                addresses,
                client_mode=options.client,
                listen=listen_on(port),
                announce=options.announced,
                must_bootstrap=False,
            )
            reason = ""
        except ValueError as error:
            reason = str(error)
    try:
        yield dht, reason
    finally:
        if dht is not None:
            dht.shutdown()


def listen_on(port: int) -> tuple[str, ...]:
    return (f"/ip4/{EVERYWHERE}/tcp/{port}",)


def check_resources(
    found: Survey, settings: SwarmSettings, options: JoinOptions, report: Callable[[Check], None]
) -> None:
    free = free_memory(found.device)
    try:
        found.batch = plan_batch(
            settings, found.device, free, precision=options.precision, batch_size=options.batch_size, ranks=ranks_here()
        )
        report(checks.check_memory(found.batch, free, found.device))
    except ValueError as error:
        fix = "use --precision bf16 on a GPU that has it, end other programs on the GPU, or use --device cpu"
        report(Check("memory", PROBLEM, str(error), fix))
    report(checks.check_disk(found.folder, state_bytes(settings)))
    check, shards = checks.check_data(options.data or settings.swarm.data, settings)
    found.shards = shards and dataclasses.replace(shards, patience=Patience())
    report(check)


def choose_folder(run: RunFiles | None, options: JoinOptions) -> Path | None:
    """The folder, once it is known; UserError if another process works there, as a second peer of this machine."""
    folder = options.folder
    if folder is None and run is not None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = default_folder(cache / "dalle-lean" / "runs", run.settings)
    if folder is not None and is_locked(folder):
        raise UserError(busy(folder, "--folder"))
    return folder


def default_folder(runs: Path, settings: SwarmSettings) -> Path:
    """The folder of this machine's identity and pass: the same after a rollback, which changes the run's name."""
    of_this_name = runs / settings.run_id
    lasting = runs / f"{settings.swarm.first_name}-{settings.run_id.rpartition('-')[2]}"
    return of_this_name if of_this_name.exists() else lasting


def check_code(swarm: SwarmSection, code: str | None) -> None:
    """UserError for a code of another run."""
    if code is None or not swarm.run_key:
        return
    try:
        Invite.read(code, swarm.run_key)
    except Forged:
        fix = (
            "ask its host for one, and copy all of it" if swarm.admission != OPEN else "it needs none: leave out --code"
        )
        raise UserError(f"--code {code[:40]}...: not a code of this run; {fix}") from None


def check_name(folder: Path, user: str | None) -> Check | None:
    """A warning if the identity in the folder last took part under another name, else None."""
    before = read_text(folder / NAME) if (folder / NAME).exists() else user
    if user is None or before == user:
        return None
    found = f"the identity in {folder} went by the name {before}; all that it gave counts for {user} from now on"
    return Check("name", WARNING, found, f"if {user} is somebody else, press Ctrl+C and name another --folder")


def check_helpers(dht: hivemind.DHT | None, reason: str) -> Check:
    """Whether a helper answers."""
    if dht is None:
        return Check("swarm", PROBLEM, reason, "check that this machine is online, or ask the host for its address")
    return Check("swarm", OK, "a helper answers")


def check_admission(found: Survey, settings: SwarmSettings, options: JoinOptions, dht: hivemind.DHT) -> Check:
    """Get a pass for this machine, which is saved in its folder."""
    try:
        with run_folder(found.folder, "--folder"):
            found.gate = enter_by_pass(
                dht, found.addresses, settings, found.folder, name=options.user or "", code=options.code or ""
            )
    except Refused as refusal:
        return Check("admission", PROBLEM, refusal.found, refusal.fix)
    except Unanswered as silence:
        return Check("admission", PROBLEM, str(silence), "try again when the host is up")
    return Check("admission", OK, "this machine has a pass, which is renewed automatically")
