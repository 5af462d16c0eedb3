"""A peer of the host as a process, which `dalle-lean host` starts: `python -m training.swarm NAME RUN_DIR`.

It logs to RUN_DIR/logs/NAME.log and writes its status to RUN_DIR/status/NAME.json. SIGTERM, SIGINT or the death of its
parent ends it cleanly.
"""

import argparse
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import hivemind

from dalle_lean.errors import UserError
from training.swarm.averaging.attestation import Attestation
from training.swarm.config import SwarmSettings, read_settings
from training.swarm.host.checkpointer import Checkpointer, heldout_batch
from training.swarm.host.checkpoints import Checkpoints
from training.swarm.host.host_config import HostConfig, identity_path, role_in
from training.swarm.host.host_gate import ban_proven, begin_host_admission, host_gate_with_pass
from training.swarm.host.roles import run_donor, run_helper
from training.swarm.host.run_setup import update_run_files
from training.swarm.host.status import StatusFile
from training.swarm.network.bootstrap_service import PUBLIC, credits_name, offer_run
from training.swarm.network.dht import log_to, open_dht, prepare_process
from training.swarm.network.run_records import keep_own_records
from training.swarm.network.run_watch import RunWatch
from training.swarm.observe.peer_metrics import PeerMetrics, Publisher
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer

CONTACT_TIMEOUT_S = 90.0
POLL_S = 0.3

Wait = Callable[[float], bool]
"""Waits this many seconds; returns whether the peer should end."""


def main() -> None:
    """Run the peer that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m training.swarm")
    parser.add_argument("name", help="the peer's name in host.json, which begins with its role")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--device", default="cpu", help="the device on which a donor measures")
    # From the host: it may die while this process still imports, and getppid() would then name another.
    parser.add_argument("--parent", type=int, default=os.getppid(), help="the process whose death ends this peer")
    arguments = parser.parse_args()
    run_dir, name = arguments.run_dir, arguments.name
    (run_dir / "logs").mkdir(exist_ok=True)
    stop = threading.Event()
    prepare_process()
    # Not earlier: the process that ends orphans must itself end by SIGTERM.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log_to(run_dir / "logs" / f"{name}.log", output=True)

    def wait(seconds: float) -> bool:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # set by hivemind
        if ignored and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, lambda *_: stop.set())
        return stop.wait(seconds) or os.getppid() != arguments.parent

    status = StatusFile(run_dir, name)
    try:
        settings, dht = open_peer(run_dir, name, wait)
        try:
            if role_in(name) == "helper":
                helper_main(run_dir, settings, dht, wait, status)
            else:
                donor_main(run_dir, settings, dht, wait, status, arguments.device)
        finally:
            dht.shutdown()
    except UserError as error:  # OutOfSync among them
        status.notice(str(error))
        sys.exit(2)


def helper_main(run_dir: Path, settings: SwarmSettings, dht: hivemind.DHT, wait: Wait, status: StatusFile) -> None:
    """Reduce, and serve newcomers the run's files."""
    # The host ends its own helpers with the run. A helper elsewhere keeps running, as any peer could claim the end.
    helper_of = HostConfig.load(run_dir).helper_of
    watch = RunWatch(dht, settings, helper_of) if helper_of else None

    def has_moved() -> bool:
        return watch is not None and watch.moved is not None

    def report(optimizer: SwarmOptimizer) -> None:
        step = optimizer.tracker.global_epoch * settings.steps_per_epoch
        status.update(step=step, trainers=optimizer.tracker.trainers)
        for line in ban_proven(run_dir):
            status.notice(line)

    try:
        offer_run(dht, run_dir)
        attestation = Attestation(run_dir / PUBLIC / credits_name(dht.peer_id))
        run_helper(settings, dht, lambda seconds: has_moved() or wait(seconds), report, attestation)
        if has_moved():
            status.notice("the run's settings have changed; this helper restarts with them")
    finally:
        if watch is not None:
            watch.close()


def donor_main(
    run_dir: Path, settings: SwarmSettings, dht: hivemind.DHT, wait: Wait, status: StatusFile, device: str
) -> None:
    """Keep the state, starting from the newest checkpoint."""
    checkpoints = Checkpoints(run_dir, settings, HostConfig.load(run_dir), status.notice)

    def report() -> None:
        status.update(
            heldout_loss=checkpointer.heldout_loss,
            checkpoint=checkpointer.saved_step,
            failed_saves=checkpoints.failed,
            go_back_to=checkpointer.go_back_to,
        )

    heldout = heldout_batch(settings, run_dir / "tokenizer.json", status.notice, device)
    checkpointer = Checkpointer(checkpoints, heldout, device=device, on_change=report, stopped=lambda: wait(0))

    def on_round(optimizer: SwarmOptimizer) -> None:
        step = optimizer.local_epoch * settings.steps_per_epoch
        status.update(step=step, trainers=optimizer.tracker.trainers, checkpoint=checkpointer.saved_step)
        own.epoch = optimizer.local_epoch
        if not math.isnan(checkpointer.heldout_loss):  # which it is during a measurement
            own.loss = checkpointer.heldout_loss
        publisher.publish(own)

    own = PeerMetrics()
    """A donor publishes the held-out loss as its loss."""
    publisher = Publisher(dht, settings.run_id, role="donor")
    try:
        run_donor(settings, dht, wait, checkpointer=checkpointer, on_round=on_round, on_notice=status.notice)
    finally:
        publisher.close()
    status.update(finished=checkpointer.is_finished)


def open_peer(run_dir: Path, name: str, wait: Wait) -> tuple[SwarmSettings, hivemind.DHT]:
    """The run's settings, and a DHT node with this peer's identity and port."""
    host_config = HostConfig.load(run_dir)
    if host_config.helper_of:
        update_run_files(run_dir, host_config.helper_of)
    settings, port = read_settings(run_dir), host_config.ports[name]
    gate = host_gate_with_pass(run_dir, settings, name) if settings.swarm.run_key else None
    dht = open_dht(
        host_config.helper_of or contacts(run_dir, host_config, name, wait),
        client_mode=False,
        listen=[f"/ip4/{host_config.listen}/tcp/{port}"],
        announce=[f"/ip4/{host_config.announce}/tcp/{port}"],
        identity=identity_path(run_dir, name),
        gate=gate,
    )
    keep_own_records(dht, settings)
    if gate is not None:
        begin_host_admission(dht, run_dir, settings, name)
    return settings, dht


def contacts(run_dir: Path, host_config: HostConfig, name: str, wait: Wait) -> list[str]:
    """Addresses of the host's other peers that are up.

    Only the first helper may start alone, so that a run never has two DHTs; the others wait for a peer.
    """
    others = [other for other in host_config.ports if other != name]
    deadline = time.monotonic() + CONTACT_TIMEOUT_S
    while True:
        present = [other for other in others if host_config.is_up(other)]
        if present or name == host_config.helpers[0]:
            return [host_config.local_address(run_dir, other) for other in present]
        if time.monotonic() > deadline:
            raise UserError(f"none of {', '.join(others)} accepts connections; {name} does not start alone")
        if wait(POLL_S):
            sys.exit()


if __name__ == "__main__":
    main()
