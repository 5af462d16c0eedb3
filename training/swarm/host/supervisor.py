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

from dalle_lean.ending import Terminated
from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json
from dalle_lean.progress import OnProgress
from training.run.progress import OnNotice
from training.swarm.config import SwarmSettings
from training.swarm.host.host_config import HostConfig
from training.swarm.observe.log import set_aside

POLL_S = 0.5
STOP_POLL_S = 0.1
PROBE_S = 5.0
DEAD_PROBES = 3
"""So many times in a row a peer takes no connection before it is started again."""
LONGEST_PAUSE_S = 60.0
SOUND_AFTER_S = 60.0
"""Who has lived so long is started again at once."""
START_TIMEOUT_S = 120.0
PORT_TIMEOUT_S = 15.0
"""So long what is left of a peer may hold its port."""
LEAVE_TIMEOUT_S = 300.0
"""For all of the host's peers together: a round of averaging, and a state that is written to a slow disk."""
PATIENT_S = 3.0
"""Longer than this nobody waits without being told what for."""


@dataclass
class ManagedProcess:
    """One of the host's peers, as its supervisor knows it."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    due_s: float = field(default_factory=time.monotonic)
    """When it may be started."""
    pause_s: float = 1.0
    was_up: bool = False
    silent_probes: int = 0
    told_of_port: bool = False
    heard: tuple[int, int] = (0, 0)
    """Process id, and how many of its notices were passed on."""


class Supervisor:
    """Starts the host's peers, and again whatever of them ends.

    Args:
        host_config: of the run.
        device: where a donor measures.
        on_notice: told what happens to them.
    """

    def __init__(self, run_dir: Path, host_config: HostConfig, *, device: str = "cpu", on_notice: OnNotice):
        self.run_dir, self.host_config, self.device, self.on_notice = run_dir, host_config, device, on_notice
        self.members = {name: ManagedProcess(name) for name in host_config.ports}
        self.probed_s = 0.0
        self.was_ready = False
        """Whether all of them were there at one time."""
        for name in host_config.ports:
            self.status_path(name).unlink(missing_ok=True)

    @property
    def all_up(self) -> bool:
        """Whether all have been started and take connections."""
        return all(member.was_up for member in self.members.values())

    @property
    def finished(self) -> bool:
        """Whether the run is at its end and its state is kept."""
        return any(self.status(name).get("finished") for name in self.host_config.leading)

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
            self.reap(member)
        self.probe()
        for member in self.members.values():
            self.pass_on(member)
        for member in self.members.values():
            if member.process is not None or time.monotonic() < member.due_s or self.finished:
                continue
            if self.host_config.is_up(member.name):
                self.wait_for_port(member)
            else:
                self.start(member)

    def wait_for_port(self, member: ManagedProcess) -> None:
        """Give what is left of a peer a moment; ValueError where another program keeps its port from the beginning."""
        if time.monotonic() - member.due_s < PORT_TIMEOUT_S or member.told_of_port:
            return
        taken = f"port {self.host_config.ports[member.name]} of {member.name} is taken by another program"
        if not self.was_ready:
            raise UserError(f"{taken}; end it, or choose others with --port")
        self.on_notice(f"{taken}; end it, {member.name} starts as soon as it is free")
        member.told_of_port = True

    def start(self, member: ManagedProcess) -> None:
        """Start a peer as a process."""
        log = self.run_dir / "logs" / f"{member.name}.log"
        log.parent.mkdir(exist_ok=True)
        # -P: the current folder may have a package `training`.
        command = [sys.executable, "-P", "-m", "training.swarm", member.name.partition("-")[0], str(self.run_dir)]
        command += ["--name", member.name, "--device", self.device]
        set_aside(log)
        with open(log, "ab") as output:  # of what it says before it writes the log itself
            member.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl+C is for the supervisor
            )
        member.started_s, member.was_up, member.silent_probes = time.monotonic(), False, 0
        member.told_of_port = False

    def reap(self, member: ManagedProcess) -> None:
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
            if self.host_config.is_up(member.name):
                member.was_up, member.silent_probes = True, 0
            elif member.was_up:
                member.silent_probes += 1
            elif time.monotonic() - member.started_s > START_TIMEOUT_S:
                member.silent_probes = DEAD_PROBES
            if member.silent_probes >= DEAD_PROBES:
                self.on_notice(f"{member.name} takes no connections; it is ended")
                member.process.kill()
        self.was_ready = self.was_ready or self.all_up

    def pass_on(self, member: ManagedProcess) -> None:
        """Tell what a peer has said."""
        status = self.status(member.name)
        pid, noticed, lines = status.get("pid", 0), status.get("noticed", 0), status.get("notices", [])
        before = member.heard[1] if pid == member.heard[0] else 0
        for line in lines[max(0, len(lines) - (noticed - before)) :]:
            self.on_notice(f"{member.name}: {line}")
        member.heard = (pid, noticed)

    def stop(self) -> None:
        """End all peers cleanly in LEAVE_TIMEOUT_S at most, donors first, which save where they are; at once where
        that is interrupted: they do not hear of Ctrl+C, and would go on writing to a run that nobody holds."""
        try:
            self.wait_for_all()
        except BaseException:
            for member in self.members.values():
                if member.process is not None:
                    member.process.kill()
                    member.process.wait()
            raise

    def wait_for_all(self) -> None:
        """As long as they take to leave, at most LEAVE_TIMEOUT_S."""
        began_s = time.monotonic()
        duties = {"save and leave the others": self.host_config.donors, "leave the others": self.host_config.helpers}
        for duty, names in duties.items():
            running = {name: process for name in names if (process := self.members[name].process) is not None}
            for process in running.values():
                process.send_signal(signal.SIGTERM)
            told = False
            while left := [name for name, process in running.items() if process.poll() is None]:
                waited_s = time.monotonic() - began_s
                if waited_s > LEAVE_TIMEOUT_S:
                    self.on_notice(f"{', '.join(left)} did not end in {LEAVE_TIMEOUT_S:.0f} s; killed")
                    for name in left:
                        running[name].kill()
                        running[name].wait()
                elif waited_s > PATIENT_S and not told:
                    told = True
                    self.on_notice(
                        f"waiting for {' and '.join(left)} to {duty}, "
                        f"{LEAVE_TIMEOUT_S:.0f} s at most (Ctrl+C again stops at once)"
                    )
                time.sleep(STOP_POLL_S)
            for name in names:
                self.pass_on(self.members[name])
                self.members[name].process = None


def how_it_ended(code: int) -> str:
    """A process' return code in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where the run is, as its donors say.

    A loss is nan before it is measured, a checkpoint 0 before it is written and None where another machine keeps them.
    """

    step: int = 0
    trainers: int = 0
    heldout_loss: float = math.nan
    checkpoint: int | None = None
    failed_saves: int = 0

    @property
    def note(self) -> str:
        """A few words for a progress line."""
        words = [f"{self.trainers} trainer{'s' * (self.trainers != 1)}"]
        if math.isfinite(self.heldout_loss):
            words.append(f"held-out loss {self.heldout_loss:.4g}")
        if self.checkpoint is not None:
            words.append(f"checkpoint of step {self.checkpoint}" if self.checkpoint else "no checkpoint yet")
        if self.failed_saves:
            words.append(f"{self.failed_saves} checkpoints could not be written")
        return ", ".join(words)


def run_status(supervisor: Supervisor) -> RunStatus:
    """From the donor that is farthest."""
    leading = supervisor.host_config.leading
    said = max((supervisor.status(name) for name in leading), key=lambda status: status.get("step") or 0)
    loss = said.get("heldout_loss")
    return RunStatus(
        step=said.get("step") or 0,
        trainers=said.get("trainers") or 0,
        heldout_loss=math.nan if loss is None else loss,
        checkpoint=said.get("checkpoint"),
        failed_saves=said.get("failed_saves") or 0,
    )


@contextmanager
def supervised(run_dir: Path, *, device: str = "cpu", on_notice: OnNotice) -> Iterator[Supervisor]:
    """A supervisor whose peers end with the block, and with this process however it ends."""
    from training.swarm.network.orphan_reaper import guard_children

    guard = guard_children()
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        supervisor = Supervisor(run_dir, HostConfig.load(run_dir), device=device, on_notice=on_notice)
        try:
            yield supervisor
        finally:
            supervisor.stop()
    finally:
        signal.signal(signal.SIGTERM, before)
        guard.terminate()


def terminate(*_: object) -> None:
    """SIGTERM ends a host as Ctrl+C does: service managers send it."""
    raise Terminated


def host_run(
    run_dir: Path,
    settings: SwarmSettings,
    *,
    device: str = "cpu",
    on_ready: Callable[[], None],
    on_progress: OnProgress,
    on_notice: OnNotice,
) -> RunStatus:
    """Keep the run alive until its last step; returns how it ended.

    Args:
        on_ready: called once all of the host's peers are there.
        on_progress: called with steps done, steps in all, and a note.

    Raises KeyboardInterrupt upon Ctrl+C and Terminated upon SIGTERM, once all peers have left.
    """
    with supervised(run_dir, device=device, on_notice=on_notice) as supervisor:
        ready = False
        while not supervisor.finished:
            supervisor.look()
            if supervisor.all_up:
                if not ready:
                    ready = True
                    on_ready()
                seen = run_status(supervisor)
                on_progress(seen.step, settings.total_steps, seen.note)
            time.sleep(POLL_S)
        return run_status(supervisor)
