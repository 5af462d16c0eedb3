"""All checks of a machine for one run, in the order in which they are shown, before it takes part."""

import dataclasses
import hashlib
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import hivemind
import torch
from hivemind.dht.crypto import RSASignatureValidator

from dalle_lean.devices import pick_device
from dalle_lean.errors import UserError
from training.data.catalog import ShardSet
from training.data.remote_io import Patience
from training.swarm.config import NAME, SwarmSettings, read_settings
from training.swarm.network.bootstrap_service import (
    TOKENIZER,
    RunFiles,
    Unanswered,
    fetch_run,
    is_reachable,
    remote_time,
)
from training.swarm.network.dht import open_dht
from training.swarm.observe.peer_metrics import check_user_name
from training.swarm.optimizer.progress_tracker import SLOWEST_TRAINER, readable, without_lone_claims
from training.swarm.preflight.batch_size import Fit, fit_memory, memory_there, state_bytes
from training.swarm.preflight.checks import (
    OK,
    PROBLEM,
    Check,
    check_clock,
    check_data,
    check_device,
    check_disk,
    check_fingerprint,
    check_memory,
    check_reach,
    check_versions,
    installed_versions,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What a volunteer may choose, in the order of the command line; None is what fits.

    Args:
        data: the run's shards, where they are not to be taken from where the run says.
        folder: of this peer's identity and place in the data.
        listen: port on which connections are taken.
        client: take none.
        announce: how others reach that port, as /ip4/ADDRESS/tcp/PORT, where it is not as helpers see it.
        batch_size: samples between two reports to the others.
        device, precision: as for training alone.
        user: a name for the list of who gave how much.
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

    def __post_init__(self) -> None:
        if self.client and (self.listen is not None or self.announce):
            raise UserError("--client takes no connections: leave out --listen and --announce")
        if self.announce and self.listen is None:
            raise UserError("--announce says how others reach a port: name the port with --listen")
        if self.user is not None:
            check_user_name(self.user)

    @property
    def wanted(self) -> str:
        """ "client", "listen", or "auto": listening if a helper comes through."""
        return "client" if self.client else "listen" if self.listen is not None else "auto"


@dataclass(kw_only=True)
class Findings:
    """What the checks found, for taking part; what could not be found is missing."""

    checks: list[Check] = field(default_factory=list)
    run: RunFiles | None = None
    addresses: tuple[str, ...] = ()
    folder: Path | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fit: Fit | None = None
    shards: ShardSet | None = None
    port: int = 0
    """Listened on; 0 in client mode."""

    @property
    def problems(self) -> list[Check]:
        """What keeps this machine out."""
        return [check for check in self.checks if check.level == PROBLEM]


def survey(targets: Sequence[str], options: Options, on_check: Callable[[Check], None]) -> Findings:
    """All checks for the run that `targets` names, by addresses of its helpers or by its swarm.toml.

    Args:
        on_check: gets each check as soon as it is made.

    Raises ValueError where nobody says what the run is.
    """
    found = Findings(addresses=addresses_of(targets))

    def tell(check: Check) -> None:
        found.checks.append(check)
        on_check(check)

    tell(check_versions(installed_versions()))
    found.device = pick_device(options.device)
    tell(check_device(found.device))
    if not found.addresses:
        found.run = read_files(Path(targets[0]))
        found.addresses = found.run.settings.swarm.addresses
    port = 0 if options.client else options.listen or free_port()
    with first_contact(found.addresses, options, port) as (dht, reason):
        theirs = first_answer(dht, found.addresses, fetch_run)
        found.run = found.run or theirs
        if found.run is None:
            raise UserError(
                reason or f"no helper at {', '.join(targets)} hands out the run's files; ask its host for swarm.toml"
            )
        settings = found.run.settings
        found.folder = options.folder or default_folder(settings.run_id)
        check_place(found, settings, options, tell)
        tell(check_helpers(dht, reason, settings))
        tell(check_clock(clock_offset_s(dht, found.addresses)))
        reachable = None
        if not options.client:
            reachable = first_answer(dht, found.addresses, lambda node, address: is_reachable(node, address, port))
        tell(check_reach(wanted=options.wanted, port=port, reachable=reachable, announced=bool(options.announce)))
        found.port = port if options.wanted == "listen" or reachable else 0
        sha256 = hashlib.sha256(found.run.tokenizer).hexdigest()
        tell(check_fingerprint(settings, theirs.settings if theirs else None, sha256))
    return found


def addresses_of(targets: Sequence[str]) -> tuple[str, ...]:
    """The targets, if they are addresses of helpers; none, if there is one that is a file. Else ValueError."""
    addresses = [target for target in targets if "/p2p/" in target]
    if len(addresses) not in (0, len(targets)) or (not addresses and len(targets) != 1):
        raise UserError(f"{' '.join(targets)}: give one swarm.toml, or addresses of one run (/ip4/.../tcp/.../p2p/...)")
    return tuple(addresses)


def read_files(path: Path) -> RunFiles:
    """A run's files, by its swarm.toml or the folder of it; ValueError where one is missing or malformed."""
    path = path / NAME if path.is_dir() else path
    settings, tokenizer = read_settings(path), path.with_name(TOKENIZER)
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer} is missing; it belongs beside {path.name}, or join by the run's address")
    return RunFiles(settings, path.read_text(encoding="utf-8"), tokenizer.read_bytes())


def default_folder(run_id: str) -> Path:
    """Where this machine remembers its part in a run."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dalle-lean" / "runs" / run_id


def ranks_here() -> int:
    """Processes that torchrun has started for this peer."""
    return int(os.environ.get("WORLD_SIZE", 1))


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether it can be listened on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


@contextmanager
def first_contact(addresses: Sequence[str], options: Options, port: int) -> Iterator[tuple[hivemind.DHT | None, str]]:
    """A node without an identity, for a first look; without one where no address answers, and why.

    ValueError where the port is taken.
    """
    if port and not port_is_free(port):
        raise UserError(f"--listen {port}: another program listens there; end it or name another port")
    dht, reason = None, "the run names no address of a helper"
    if addresses:
        try:
            dht = open_dht(addresses, client_mode=options.client, listen=listen_on(port), announce=options.announce)
            reason = ""
        except ValueError as error:
            reason = str(error)
    try:
        yield dht, reason
    finally:
        if dht is not None:
            dht.shutdown()


def listen_on(port: int) -> tuple[str, ...]:
    """All interfaces."""
    return (f"/ip4/0.0.0.0/tcp/{port}",)


def first_answer(dht: hivemind.DHT | None, addresses: Sequence[str], ask: Callable[[hivemind.DHT, str], T]) -> T | None:
    """Of the first helper that answers; None where none does."""
    for address in addresses if dht is not None else ():
        try:
            return ask(dht, address)
        except Unanswered:
            continue
    return None


def check_place(found: Findings, settings: SwarmSettings, options: Options, tell: Callable[[Check], None]) -> None:
    """Memory, disk and data."""
    assert found.folder is not None
    there = memory_there(found.device)
    try:
        found.fit = fit_memory(
            settings,
            found.device,
            there,
            precision=options.precision,
            batch_size=options.batch_size,
            ranks=ranks_here(),
        )
        tell(check_memory(found.fit, there, found.device))
    except ValueError as error:
        cure = "give --precision bf16 on a GPU that has it, end what else uses its memory, or take --device cpu"
        tell(Check("memory", PROBLEM, str(error), cure))
    tell(check_disk(found.folder, state_bytes(settings)))
    check, shards = check_data(options.data or settings.swarm.data, settings)
    found.shards = shards and dataclasses.replace(shards, patience=Patience())
    tell(check)


def check_helpers(dht: hivemind.DHT | None, reason: str, settings: SwarmSettings) -> Check:
    """Who is there."""
    if dht is None:
        return Check("swarm", PROBLEM, reason, "see that this machine is online, or ask the host for an address of now")
    dht.add_validators([RSASignatureValidator()])  # it takes the signatures off
    entry = dht.get(f"{settings.run_id}_progress", latest=True)
    return check_progress(None if entry is None else entry.value, settings)


def check_progress(said: Any, settings: SwarmSettings) -> Check:
    """How far the run is by what its peers say, as hivemind's tracker stores it; what one alone claims is left out."""
    records = readable(
        said, last_epoch=settings.last_epoch, target_batch_size=settings.target_batch_size, oldest=-math.inf
    )
    believed = without_lone_claims(records, own_epoch=0, own_key=None).values()
    step = max((record.epoch for record in believed), default=0) * settings.steps_per_epoch
    rates = [record.samples_per_second for record in believed if record.samples_per_second > SLOWEST_TRAINER]
    if not rates:
        known = f"nobody trains at this moment, the run is at step {step}" if step else "nobody trains yet"
        return Check("swarm", OK, f"a helper answers; {known}")
    count = f"{len(rates)} trainer{'s' * (len(rates) > 1)}"
    return Check("swarm", OK, f"{count} at step {step} of {settings.total_steps}, {sum(rates):,.3g} samples/s together")


def clock_offset_s(dht: hivemind.DHT | None, addresses: Sequence[str]) -> float | None:
    """How far this machine's clock is behind the first helper's that answers."""
    return first_answer(dht, addresses, lambda node, address: remote_time(node, address) - time.time())
