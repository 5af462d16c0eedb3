"""Runs the host's peers as processes and restarts them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalle_lean.ending import Terminated, terminate
from dalle_lean.errors import UserError
from dalle_lean.progress import OnNotice, OnProgress, silent
from training.swarm.config import SwarmSettings
from training.swarm.host.checkpoints import begin_rollback, newest_checkpoint, rollback
from training.swarm.host.host_config import HostConfig
from training.swarm.host.status import RunStatus, read_status, status_path
from training.swarm.network.orphan_reaper import guard_children
from training.swarm.observe.log import rotate_log

POLL_S = 0.5
STOP_POLL_S = 0.1
PROBE_INTERVAL_S = 5.0
MAX_FAILED_PROBES = 3
"""In a row, before a peer is restarted."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Pause before a restart; doubled each time."""
STABLE_AFTER_S = 60.0
"""A peer that has run this long is restarted after MIN_PAUSE_S again."""
START_TIMEOUT_S = 120.0
PORT_TIMEOUT_S = 15.0
"""How long the processes of an ended peer may still hold its port."""
LEAVE_TIMEOUT_S = 300.0
"""For all of the host's peers together: enough for a round, and to write a state to a slow disk."""
FAREWELL_S = 10.0
"""For trainers to notice that the run is over: clients can read it on the host's helpers only."""
PAGE_TIMEOUT_S = 15.0
"""For the run's page to be written a last time, and its newest checkpoint packed."""
SILENT_WAIT_S = 3.0
"""After this, the host says what it waits for."""


@dataclass
class ManagedProcess:
    """One of the host's peers."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    due_s: float = field(default_factory=time.monotonic)
    """When it may be started, on the monotonic clock."""
    pause_s: float = MIN_PAUSE_S
    was_up: bool = False
    failed_probes: int = 0
    port_reported: bool = False
    notices_read: tuple[int, int] = (0, 0)
    """Process id, and how many of its notices were forwarded."""


class Supervisor:
    """Starts the host's peers, and restarts those that end.

    Args:
        device: for donors to measure on.
        page: options of `dalle-lean monitor` for the run's page; empty for no page. It starts once all peers are up,
            and the run does not depend on it.
        on_wait: called with what the end waits for, which is no trouble.
    """

    def __init__(
        self,
        run_dir: Path,
        host_config: HostConfig,
        *,
        device: str = "cpu",
        page: Sequence[str] = (),
        on_notice: OnNotice,
        on_wait: OnNotice = silent,
    ):
        self.run_dir, self.host_config, self.device = run_dir, host_config, device
        self.on_notice, self.on_wait = on_notice, on_wait
        self.processes = {name: ManagedProcess(name) for name in host_config.ports}
        self.page_options, self.page = page, ManagedProcess("page")
        self.probed_s = 0.0
        for name in host_config.ports:
            status_path(run_dir, name).unlink(missing_ok=True)

    @property
    def all_up(self) -> bool:
        """Whether all peers have started and accept connections."""
        return all(peer.was_up for peer in self.processes.values())

    @property
    def finished(self) -> bool:
        """Whether the run has ended and its final state is saved."""
        return any(read_status(self.run_dir, name).get("finished") for name in self.host_config.leading)

    @property
    def go_back_to(self) -> int | None:
        """The step of the checkpoint to which a donor wants the run rolled back, if any."""
        asked = (read_status(self.run_dir, name).get("go_back_to") for name in self.host_config.donors)
        return next((step for step in asked if step is not None), None)

    def poll(self) -> None:
        """Reap, probe and start peers; does not block."""
        for peer in self.processes.values():
            self.reap(peer)
        self.probe()
        for peer in self.processes.values():
            self.forward_notices(peer)
            if peer.process is not None or time.monotonic() < peer.due_s or self.finished:
                continue
            if self.host_config.is_up(peer.name):
                self.wait_for_port(peer)
            else:
                self.start(peer)
        self.reap(self.page)
        if self.page_options and self.page.process is None and self.all_up and time.monotonic() >= self.page.due_s:
            self.start_page()

    def wait_for_port(self, peer: ManagedProcess) -> None:
        """Wait for an ended peer's processes to free the port; after PORT_TIMEOUT_S say that it is taken, once."""
        if time.monotonic() - peer.due_s < PORT_TIMEOUT_S or peer.port_reported:
            return
        self.on_notice(
            f"{port_taken(self.host_config, peer.name)}; end it, and {peer.name} starts as soon as the port is free"
        )
        peer.port_reported = True

    def start(self, peer: ManagedProcess) -> None:
        # -P: the current folder may hold a package named `training`.
        command = [sys.executable, "-P", "-m", "training.swarm", peer.name, str(self.run_dir)]
        options = ["--device", self.device, "--parent", str(os.getpid())]
        self.launch(peer, [*command, *options])

    def start_page(self) -> None:
        """Start the process of the run's page, at low priority."""
        helper = self.host_config.local_address(self.run_dir, self.host_config.helpers[0])
        program = ["nice", "-n", "10", sys.executable, "-P", "-c", "from dalle_lean.cli import main; main()"]
        options = ["--run-dir", str(self.run_dir), "--out", str(self.run_dir / "watch"), *self.page_options]
        self.launch(self.page, [*program, "monitor", helper, *options], quiet=True)

    def launch(self, peer: ManagedProcess, command: Sequence[str], *, quiet: bool = False) -> None:
        """Start a process with its own log, which gets only its errors if `quiet`."""
        log = self.run_dir / "logs" / f"{peer.name}.log"
        log.parent.mkdir(exist_ok=True)
        rotate_log(log)
        with open(log, "ab") as output:  # until the process opens the log itself
            peer.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if quiet else output,
                stderr=output,
                start_new_session=True,  # Ctrl+C goes to the supervisor only
            )
        peer.started_s, peer.was_up, peer.failed_probes = time.monotonic(), False, 0
        peer.port_reported = False

    def reap(self, peer: ManagedProcess) -> None:
        """Schedule the restart of a peer that has ended."""
        if peer.process is None or peer.process.poll() is None:
            return
        code = peer.process.returncode
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        peer.process = None
        self.forward_notices(peer)
        if self.finished:
            return
        if time.monotonic() - peer.started_s > STABLE_AFTER_S:
            peer.pause_s = MIN_PAUSE_S
        peer.due_s = time.monotonic() + peer.pause_s
        self.on_notice(
            f"{peer.name} ended ({how}); it restarts in {peer.pause_s:.0f} s as the same peer, "
            f"see {self.run_dir / 'logs' / peer.name}.log"
        )
        peer.pause_s = min(2 * peer.pause_s, MAX_PAUSE_S)

    def probe(self) -> None:
        """Find out which peers accept connections; kill those that no longer do."""
        waiting = any(peer.process is not None and not peer.was_up for peer in self.processes.values())
        if not waiting and time.monotonic() - self.probed_s < PROBE_INTERVAL_S:
            return
        self.probed_s = time.monotonic()
        for peer in self.processes.values():
            if peer.process is None:
                continue
            if self.host_config.is_up(peer.name):
                peer.was_up, peer.failed_probes = True, 0
            elif peer.was_up:
                peer.failed_probes += 1
            elif time.monotonic() - peer.started_s > START_TIMEOUT_S:
                peer.failed_probes = MAX_FAILED_PROBES
            if peer.failed_probes >= MAX_FAILED_PROBES:
                self.on_notice(f"{peer.name} does not accept connections; it is restarted")
                peer.process.kill()

    def forward_notices(self, peer: ManagedProcess) -> None:
        status = read_status(self.run_dir, peer.name)
        pid, noticed, lines = status.get("pid", 0), status.get("noticed", 0), status.get("notices", [])
        before = peer.notices_read[1] if pid == peer.notices_read[0] else 0
        for line in lines[max(0, len(lines) - (noticed - before)) :]:
            self.on_notice(f"{peer.name}: {line}")
        peer.notices_read = (pid, noticed)

    def stop(self) -> None:
        """End all peers cleanly within LEAVE_TIMEOUT_S: first the donors, which save their state.

        If interrupted, kill them: Ctrl+C does not reach them, and they would go on writing to an unlocked run. SIGTERM
        does not cut them off, since it may follow the Ctrl+C, or the end of the run, that they leave after.
        """
        try:
            try:
                self.end_gracefully()
            except Terminated:  # further ones are ignored
                self.end_gracefully()
                raise
        except BaseException:
            for peer in (*self.processes.values(), self.page):
                if peer.process is not None:
                    peer.process.kill()
                    peer.process.wait()
            raise

    def end_gracefully(self) -> None:
        """Send SIGTERM and wait; kill what is left after LEAVE_TIMEOUT_S. The page is last: it says how it ended."""
        began_s = time.monotonic()
        duties = {"save its state": self.host_config.donors, "leave the run": self.host_config.helpers}
        for duty, names in duties.items():
            if duty == "leave the run" and self.finished:
                self.wait_for_trainers()
            running = {name: process for name in names if (process := self.processes[name].process) is not None}
            for name, process in running.items():
                # One that still starts has nothing to save.
                process.send_signal(signal.SIGTERM if self.processes[name].was_up else signal.SIGKILL)
            reported = False
            while left := [name for name, process in running.items() if process.poll() is None]:
                waited_s = time.monotonic() - began_s
                if waited_s > LEAVE_TIMEOUT_S:
                    self.on_notice(f"{', '.join(left)} did not end in {LEAVE_TIMEOUT_S:.0f} s; killed")
                    for name in left:
                        running[name].kill()
                        running[name].wait()
                elif waited_s > SILENT_WAIT_S and not reported:
                    reported = True
                    self.on_wait(
                        f"waiting for {' and '.join(left)} to {duty}, "
                        f"{LEAVE_TIMEOUT_S:.0f} s at most (Ctrl+C now stops at once)"
                    )
                time.sleep(STOP_POLL_S)
            for name in names:
                self.forward_notices(self.processes[name])
                self.processes[name].process = None
        if self.page.process is not None:
            self.page.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.page.process.wait(PAGE_TIMEOUT_S)
            self.page.process.kill()
            self.page.process.wait()

    def wait_for_trainers(self) -> None:
        """After the last step, wait until no helper sees a trainer any more, FAREWELL_S at most."""
        began_s, reported = time.monotonic(), False
        while (waited_s := time.monotonic() - began_s) < FAREWELL_S:
            running = [name for name in self.host_config.helpers if self.processes[name].process is not None]
            if not any(read_status(self.run_dir, name).get("trainers") for name in running):
                return
            if waited_s > SILENT_WAIT_S and not reported:
                reported = True
                self.on_wait(f"the run is over; waiting for the trainers to notice, {FAREWELL_S:.0f} s at most")
            time.sleep(STOP_POLL_S)


def wait_for_ports(run_dir: Path, host_config: HostConfig, on_notice: OnNotice) -> None:
    """Wait until the ports are free, which processes of an ended host may still hold; UserError if they stay taken."""
    was_hosted = (run_dir / "logs").exists()
    due_s = time.monotonic() + (PORT_TIMEOUT_S if was_hosted else 0.0)
    reported = False
    while taken := [name for name in host_config.ports if host_config.is_up(name)]:
        if time.monotonic() >= due_s:
            raise UserError(f"{port_taken(host_config, taken[0])}; end it, or choose other ports with --port")
        if not reported:
            reported = True
            on_notice(f"{port_taken(host_config, taken[0])}; waiting {PORT_TIMEOUT_S:.0f} s at most until it is free")
        time.sleep(POLL_S)


def port_taken(host_config: HostConfig, name: str) -> str:
    return f"port {host_config.ports[name]} of {name} is taken by another program"


@contextmanager
def supervised(run_dir: Path, **options: Any) -> Iterator[Supervisor]:
    """A supervisor, with its options, whose peers end with the block, and with this process even if it is killed."""
    with ExitStack() as stack:
        stack.callback(guard_children().terminate)
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, terminate))
        supervisor = Supervisor(run_dir, HostConfig.load(run_dir), **options)
        stack.callback(supervisor.stop)
        yield supervisor


def host_run(
    run_dir: Path,
    settings: SwarmSettings,
    *,
    on_ready: Callable[[], None],
    on_progress: OnProgress,
    on_notice: OnNotice,
    **options: Any,
) -> RunStatus:
    """Keep the run alive until its last step; returns its final status.

    Args:
        on_ready: called once all of the host's peers are up.
        on_progress: called with the steps done, the total steps, and a note.
        options: see Supervisor.

    If the held-out loss rises too far, the run is rolled back to the last good checkpoint and continues under its
    successor's name, which the helpers serve and the volunteers follow.

    Raises KeyboardInterrupt upon Ctrl+C and Terminated upon SIGTERM, after all peers have left.
    """
    ready = False
    while True:
        newest = newest_checkpoint(run_dir)  # where the donors begin, before they report
        begun_at = 0 if newest is None else newest.step
        with supervised(run_dir, on_notice=on_notice, **options) as supervisor:
            while not supervisor.finished and supervisor.go_back_to is None:
                supervisor.poll()
                if supervisor.all_up:
                    if not ready:
                        ready = True
                        on_ready()
                    status = RunStatus.of_peers(run_dir, supervisor.host_config.leading)
                    on_progress(status.step or begun_at, settings.total_steps, status.note)
                time.sleep(POLL_S)
            step = supervisor.go_back_to
            if step is None:
                return RunStatus.of_peers(run_dir, supervisor.host_config.leading)
            supervisor.poll()  # forwards the reason
            begin_rollback(run_dir, step)  # the peers may take minutes to leave, and the donors save what is given up
        settings = rollback(run_dir, step, on_notice)
        on_notice(f"the run continues from step {step} as {settings.swarm.name}, with tighter clipping")
