"""A run at home: its folder, the peers that keep it alive, and who starts them again.

RUN_DIR has swarm.toml and tokenizer.json, which everybody may have; identities/ and host.json, which concern this
machine; checkpoints/, logs/ and status/.
"""

import dataclasses
import ipaddress
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalle_lean.files import read_json, sha256_file
from dalle_lean.progress import OnProgress
from dalle_lean.tokenizer import Tokenizer
from training.data import TrainingData
from training.parts import matching_vqgan, stated_codes
from training.progress import OnNotice
from training.recipe import Recipe
from training.shard_set import ShardSet, find_shards, is_url
from training.swarm.checkpoints import first_name
from training.swarm.settings import (
    NAME,
    SwarmSection,
    SwarmSettings,
    TimingSection,
    WireSection,
    read_settings,
    write_settings,
)
from training.swarm.stations import EVERYWHERE, LOOPBACK, Stations, free_ports, make_identities, peer_id

HELPERS = 2
FIRST_PORT = 31337
POLL_S = 0.5
PROBE_S = 5.0
DEAD_PROBES = 3
"""So many times in a row a peer takes no connection before it is started again."""
LONGEST_PAUSE_S = 60.0
SOUND_AFTER_S = 60.0
"""Who has lived so long is started again at once."""
START_TIMEOUT_S = 120.0
LEAVE_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where this machine listens.

    Args:
        port: of the first helper, the others have the next ones; 0 takes free ones. 0 and None keep what the run had.
        announce: the address at which others reach this machine; None for the one its packets leave from.
        listen: the address to listen on.
        donors: how many keep the state; a second one costs as much memory, and replaces the first one at once.
    """

    port: int | None = None
    announce: str | None = None
    listen: str | None = None
    donors: int = 1


def make_run(
    run_dir: Path,
    data: str | None,
    recipe: Recipe,
    *,
    tokenizer: Path | None = None,
    vqgan: Path | None = None,
    name: str | None = None,
    min_peers: int = 1,
    wire: WireSection | None = None,
    timing: TimingSection | None = None,
    place: Place | None = None,
    on_notice: OnNotice,
) -> SwarmSettings:
    """Make the folder of a run, or bring the addresses of the one that is there up to date.

    Args:
        data: shards; None only for a run that is there, which then goes on as it is.

    Raises ValueError where the run that is there has another recipe: it names what differs.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    before = read_settings(run_dir) if (run_dir / NAME).exists() else None
    made_by = None
    if data is None:
        if before is None:
            raise ValueError(f"{run_dir} holds no run yet: name the shards to train on with --data")
        settings = before
    else:
        shards = find_shards(data, codes=stated_codes(recipe, vqgan) if is_url(data) else None, on_notice=on_notice)
        settings = new_settings(run_dir, data, shards, recipe, tokenizer)
        swarm = dataclasses.replace(settings.swarm, name=name or slug(run_dir), min_peers=min_peers)
        settings = dataclasses.replace(
            settings, swarm=swarm, wire=wire or WireSection(), timing=timing or TimingSection()
        )
        if vqgan is not None:
            matching_vqgan(vqgan, shards.info)
        made_by = shards.info.vqgan
    if before is not None and data is not None:
        settings = continued(run_dir, before, settings, named=name is not None)
    stations = make_stations(run_dir, place or Place(), vqgan, made_by)
    swarm = dataclasses.replace(
        settings.swarm,
        addresses=tuple(stations.address(run_dir, helper) for helper in stations.helpers),
        donors=tuple(peer_id(run_dir, donor) for donor in stations.donors),
    )
    write_settings(run_dir / NAME, dataclasses.replace(settings, swarm=swarm))
    return read_settings(run_dir)


def new_settings(run_dir: Path, data: str, shards: ShardSet, recipe: Recipe, tokenizer: Path | None) -> SwarmSettings:
    """Settings with the recipe made complete, and the run's tokenizer.json in its folder."""
    path = run_dir / "tokenizer.json"
    if path.exists() and tokenizer is not None and sha256_file(path) != sha256_file(tokenizer):
        raise ValueError(f"{run_dir} holds a run with another tokenizer than {tokenizer}; give another folder")
    if not path.exists():
        captions = TrainingData(
            shards=shards,
            heldout_share=recipe.data.heldout_share,
            shuffle_buffer=recipe.data.shuffle_buffer,
            seed=recipe.data.seed,
        ).captions()
        source = Tokenizer.from_file(tokenizer) if tokenizer else Tokenizer.train(captions, recipe.data.text_vocab_size)
        source.save(path)
    config = recipe.model_config(
        image_side=shards.info.image_side,
        image_vocab_size=shards.info.codebook_size,
        text_vocab_size=Tokenizer.from_file(path).vocab_size,
    )
    return SwarmSettings(
        recipe=dataclasses.replace(recipe, model=config.to_dict()),
        swarm=SwarmSection(
            data=data if is_url(data) else str(Path(data).resolve()),
            data_fingerprint=shards.fingerprint,
            tokenizer_fingerprint=sha256_file(path),
        ),
    )


def continued(run_dir: Path, before: SwarmSettings, now: SwarmSettings, *, named: bool) -> SwarmSettings:
    """The settings of now under the name of before; ValueError where they are another run's."""
    differences = before.differences(now)
    if named and now.swarm.name != first_name(before.swarm.name):
        differences.append(f"name ({before.swarm.name})")
    if differences:
        raise ValueError(
            f"{run_dir} holds a run with another {', '.join(differences)}; use its own settings, or another folder"
        )
    return dataclasses.replace(now, swarm=dataclasses.replace(now.swarm, name=before.swarm.name))


def make_stations(run_dir: Path, place: Place, vqgan: Path | None, made_by: str | None) -> Stations:
    """Places and identities of the host's peers; what is not given stays as it was."""
    from training.swarm.offer import outward_ip

    names = [f"helper-{number}" for number in range(HELPERS)] + [f"donor-{number}" for number in range(place.donors)]
    try:
        before = Stations.load(run_dir)
    except ValueError:
        before = Stations(ports={}, announce="")
    listen = place.listen or before.listen
    if not place.port and set(names) <= set(before.ports):
        ports = [before.ports[name] for name in names]
    elif place.port == 0:
        ports = free_ports(len(names), LOOPBACK if listen == EVERYWHERE else listen)
    else:
        ports = [(place.port or FIRST_PORT) + number for number in range(len(names))]
    announce = place.announce or before.announce or outward_ip()
    for address in (listen, announce):
        check_ip(address)
    stations = Stations(
        ports=dict(zip(names, ports, strict=True)),
        listen=listen,
        announce=announce,
        vqgan=before.vqgan if vqgan is None else str(vqgan.resolve()),
        vqgan_fingerprint=made_by or before.vqgan_fingerprint,
    )
    make_identities(run_dir, names)
    stations.save(run_dir)
    return stations


def check_ip(address: str) -> None:
    """ValueError unless it is an IPv4 address."""
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        raise ValueError(f"{address!r} is no IPv4 address such as 203.0.113.5") from None


def is_private(address: str) -> bool:
    """Whether it means nothing in the Internet."""
    return not ipaddress.ip_address(address).is_global


def slug(run_dir: Path) -> str:
    """A run's name from its folder's."""
    return re.sub(r"[^a-z0-9]+", "-", run_dir.resolve().name.lower()).strip("-")[:56] or "run"


@dataclass
class Member:
    """One of the host's peers, as its supervisor knows it."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    due_s: float = 0.0
    """When it may be started."""
    pause_s: float = 1.0
    was_up: bool = False
    silent_probes: int = 0
    notices: list[str] = field(default_factory=list)


class Supervisor:
    """Starts the host's peers, and again whatever of them ends.

    Args:
        stations: of the run.
        device: where a donor measures.
        on_notice: told what happens to them.
    """

    def __init__(self, run_dir: Path, stations: Stations, *, device: str = "cpu", on_notice: OnNotice):
        self.run_dir, self.stations, self.device, self.on_notice = run_dir, stations, device, on_notice
        self.members = {name: Member(name) for name in stations.ports}
        self.probed_s = 0.0
        self.restarts = 0
        for name in stations.ports:
            if stations.is_up(name):
                raise ValueError(f"port {stations.ports[name]} is taken by another program; choose others with --port")
            self.status_path(name).unlink(missing_ok=True)

    @property
    def all_up(self) -> bool:
        """Whether all have been started and take connections."""
        return all(member.was_up for member in self.members.values())

    @property
    def finished(self) -> bool:
        """Whether the run is at its end and its state is kept."""
        return any(self.status(name).get("finished") for name in self.stations.donors)

    def status_path(self, name: str) -> Path:
        return self.run_dir / "status" / f"{name}.json"

    def status(self, name: str) -> dict[str, Any]:
        """What a peer last said of itself."""
        path = self.status_path(name)
        content: dict[str, Any] = read_json(path) if path.exists() else {}
        return content

    def look(self) -> None:
        """Do what is to be done now; returns at once."""
        for member in self.members.values():
            self.bury(member)
        self.probe()
        for member in self.members.values():
            self.pass_on(member)
        for member in self.members.values():
            due = member.process is None and time.monotonic() >= member.due_s and not self.finished
            if due and not self.stations.is_up(member.name):  # what is left of it may hold its port for a moment
                self.start(member)

    def start(self, member: Member) -> None:
        """Start a peer as a process."""
        log = self.run_dir / "logs" / f"{member.name}.log"
        log.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "training.swarm", member.name.partition("-")[0], str(self.run_dir)]
        command += ["--name", member.name, "--device", self.device]
        with open(log, "ab") as output:
            member.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl+C is for the supervisor
            )
        member.started_s, member.was_up, member.silent_probes = time.monotonic(), False, 0

    def bury(self, member: Member) -> None:
        """Take note of a peer that has ended, and when it is to be started again."""
        if member.process is None or member.process.poll() is None:
            return
        code = member.process.returncode
        member.process = None
        self.pass_on(member)
        if self.finished:
            return
        if time.monotonic() - member.started_s > SOUND_AFTER_S:
            member.pause_s = 1.0
        member.due_s = time.monotonic() + member.pause_s
        self.restarts += 1
        self.on_notice(
            f"{member.name} ended ({how_it_ended(code)}); it starts again in {member.pause_s:.0f} s as the same peer, "
            f"see {self.run_dir / 'logs' / member.name}.log"
        )
        member.pause_s = min(2 * member.pause_s, LONGEST_PAUSE_S)

    def probe(self) -> None:
        """Find out who takes connections; end who does so no more."""
        waiting = any(member.process is not None and not member.was_up for member in self.members.values())
        if not waiting and time.monotonic() - self.probed_s < PROBE_S:
            return
        self.probed_s = time.monotonic()
        for member in self.members.values():
            if member.process is None:
                continue
            if self.stations.is_up(member.name):
                member.was_up, member.silent_probes = True, 0
            elif member.was_up:
                member.silent_probes += 1
            elif time.monotonic() - member.started_s > START_TIMEOUT_S:
                member.silent_probes = DEAD_PROBES
            if member.silent_probes >= DEAD_PROBES:
                self.on_notice(f"{member.name} takes no connections; it is ended")
                member.process.kill()

    def pass_on(self, member: Member) -> None:
        """Tell what a peer has said."""
        said = self.status(member.name).get("notices", [])
        for line in said[len(member.notices) :] if said[: len(member.notices)] == member.notices else said:
            self.on_notice(f"{member.name}: {line}")
        member.notices = said

    def stop(self) -> None:
        """End all peers cleanly, donors first, which save where they are."""
        for names in (self.stations.donors, self.stations.helpers):
            running = [process for name in names if (process := self.members[name].process) is not None]
            for process in running:
                process.send_signal(signal.SIGTERM)
            for process in running:
                try:
                    process.wait(LEAVE_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            for name in names:
                self.pass_on(self.members[name])
                self.members[name].process = None


def how_it_ended(code: int) -> str:
    """A process' return code in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Where the run is, as its donors say. A loss is nan before it is measured."""

    step: int = 0
    peers: int = 0
    heldout_loss: float = math.nan
    checkpoint: int = 0
    failed_saves: int = 0

    @property
    def note(self) -> str:
        """A few words for a progress line."""
        words = [f"{self.peers} trainer{'s' * (self.peers != 1)}"]
        if math.isfinite(self.heldout_loss):
            words.append(f"held-out loss {self.heldout_loss:.4g}")
        words.append(f"checkpoint of step {self.checkpoint}" if self.checkpoint else "no checkpoint yet")
        if self.failed_saves:
            words.append(f"{self.failed_saves} checkpoints could not be written")
        return ", ".join(words)


def overview(supervisor: Supervisor) -> Overview:
    """From the donor that is farthest."""
    donors = supervisor.stations.donors
    said = max((supervisor.status(name) for name in donors), key=lambda status: status.get("step") or 0)
    loss = said.get("heldout_loss")
    return Overview(
        step=said.get("step") or 0,
        peers=max(0, (said.get("peers") or 0) - len(donors)),
        heldout_loss=math.nan if loss is None else loss,
        checkpoint=said.get("checkpoint") or 0,
        failed_saves=said.get("failed_saves") or 0,
    )


@contextmanager
def supervised(run_dir: Path, *, device: str = "cpu", on_notice: OnNotice) -> Iterator[Supervisor]:
    """A supervisor whose peers end with the block, and with this process however it ends."""
    from training.swarm.network import guard_children

    guard = guard_children()
    supervisor = Supervisor(run_dir, Stations.load(run_dir), device=device, on_notice=on_notice)
    try:
        yield supervisor
    finally:
        supervisor.stop()
        guard.terminate()


def host_run(
    run_dir: Path,
    settings: SwarmSettings,
    *,
    device: str = "cpu",
    on_ready: Callable[[], None],
    on_progress: OnProgress,
    on_notice: OnNotice,
) -> Overview:
    """Keep the run alive until its last step; returns how it ended.

    Args:
        on_ready: called once all of the host's peers are there.
        on_progress: called with steps done, steps in all, and a note.

    Raises KeyboardInterrupt upon Ctrl+C, once all peers have left.
    """
    with supervised(run_dir, device=device, on_notice=on_notice) as supervisor:
        ready = False
        while not supervisor.finished:
            supervisor.look()
            if supervisor.all_up:
                if not ready:
                    ready = True
                    on_ready()
                seen = overview(supervisor)
                on_progress(seen.step, settings.total_steps, seen.note)
            time.sleep(POLL_S)
        return overview(supervisor)
