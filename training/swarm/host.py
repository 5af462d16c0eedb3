"""The peers that keep a run alive, as processes, and who starts them again."""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalle_lean.files import read_json
from dalle_lean.progress import OnProgress
from training.progress import OnNotice
from training.swarm.settings import SwarmSettings
from training.swarm.stations import Stations

POLL_S = 0.5
PROBE_S = 5.0
DEAD_PROBES = 3
"""So many times in a row a peer takes no connection before it is started again."""
LONGEST_PAUSE_S = 60.0
SOUND_AFTER_S = 60.0
"""Who has lived so long is started again at once."""
START_TIMEOUT_S = 120.0
LEAVE_TIMEOUT_S = 120.0


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
    before = signal.signal(signal.SIGTERM, interrupt)
    supervisor = Supervisor(run_dir, Stations.load(run_dir), device=device, on_notice=on_notice)
    try:
        yield supervisor
    finally:
        supervisor.stop()
        signal.signal(signal.SIGTERM, before)
        guard.terminate()


def interrupt(*_: object) -> None:
    """SIGTERM ends a host as Ctrl+C does: service managers send it."""
    raise KeyboardInterrupt


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
