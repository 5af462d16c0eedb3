"""One peer as a process: `python -m training.swarm helper|donor RUN_DIR`. `dalle-lean host` starts these.

What it says goes to RUN_DIR/logs/NAME.log, its numbers to RUN_DIR/status/NAME.json; SIGTERM or SIGINT ends it cleanly.
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
from typing import Any

from dalle_lean.errors import UserError

STATUS_INTERVAL_S = 2.0
COMPANY_TIMEOUT_S = 90.0
POLL_S = 0.3


class Status:
    """RUN_DIR/status/NAME.json, for who watches this process."""

    def __init__(self, run_dir: Path, name: str):
        self.path = run_dir / "status" / f"{name}.json"
        self.content: dict[str, Any] = {"pid": os.getpid(), "notices": [], "noticed": 0}
        self.lock, self.written_s = threading.Lock(), -math.inf

    def tell(self, **changes: Any) -> None:
        """Write at once what is new; on any thread."""
        with self.lock:
            self.write(changes)

    def notice(self, line: str) -> None:
        """Something that a person should know; on any thread."""
        print(line, flush=True)
        with self.lock:
            noticed = self.content["noticed"] + 1
            self.write({"notices": [*self.content["notices"], line][-20:], "noticed": noticed})

    def write(self, changes: dict[str, Any]) -> None:
        """While the lock is held."""
        from dalle_lean.io.files import write_json

        changed = {name: None if value != value else value for name, value in changes.items()}  # nan is no JSON
        if changed.items() <= self.content.items() and time.monotonic() - self.written_s < STATUS_INTERVAL_S:
            return
        self.content |= changed
        self.written_s = time.monotonic()
        try:
            write_json(self.path, self.content)
        except OSError as error:  # a full disk is no reason to leave the others
            print(f"{self.path} could not be written: {error}", flush=True)


def main() -> None:
    """Be the peer that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m training.swarm")
    parser.add_argument("role", choices=("helper", "donor"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", help="in host.json")
    parser.add_argument("--device", default="cpu", help="where a donor measures")
    arguments = parser.parse_args()
    run_dir, name = arguments.run_dir, arguments.name or f"{arguments.role}-0"
    (run_dir / "logs").mkdir(exist_ok=True)
    stop, parent = threading.Event(), os.getppid()

    from training.swarm.network import dht as network

    network.prepare_process()
    # Only now: the guard, too, is to end by SIGTERM.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    network.log_to(run_dir / "logs" / f"{name}.log", output=True)

    def wait(seconds: float) -> bool:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # hivemind did that
        if ignored and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, lambda *_: stop.set())
        return stop.wait(seconds) or os.getppid() != parent

    status = Status(run_dir, name)
    try:
        ROLES[arguments.role](run_dir, name, arguments, wait, status)
    except UserError as error:  # OutOfSync among them
        status.notice(str(error))
        sys.exit(2)


def be_helper(run_dir: Path, name: str, _: Any, wait: Callable[[float], bool], status: Status) -> None:
    """Reduce, and hand newcomers the run's files."""
    from training.swarm.host.host_config import HostConfig
    from training.swarm.host.roles import run_helper
    from training.swarm.network.bootstrap_service import RunWatch, offer_run

    settings, dht = enter(run_dir, name)
    helper_of = tuple(HostConfig.load(run_dir).helper_of)
    # One that the host starts ends with the run. A helper elsewhere goes on: anybody can say that a run is at its end.
    watch = RunWatch(dht, settings, helper_of) if helper_of else None

    def on_round(optimizer: Any) -> None:
        status.tell(step=optimizer.tracker.global_epoch * settings.steps_per_epoch, trainers=trainers_of(optimizer))

    def has_moved() -> bool:
        return watch is not None and watch.moved is not None

    try:
        offer_run(dht, run_dir)
        run_helper(settings, dht, lambda seconds: has_moved() or wait(seconds), on_round)
        if has_moved():
            status.notice("the run goes on with other settings; this helper takes them and goes on with it")
    finally:
        if watch is not None:
            watch.close()
        dht.shutdown()


def be_donor(run_dir: Path, name: str, arguments: Any, wait: Callable[[float], bool], status: Status) -> None:
    """Keep the state: go with the others from the newest checkpoint on."""
    from training.swarm.host.checkpointer import Checkpointer, heldout_batch
    from training.swarm.host.checkpoints import Checkpoints
    from training.swarm.host.host_config import HostConfig
    from training.swarm.host.roles import run_donor
    from training.swarm.peer.gradient_worker import build_model

    settings, dht = enter(run_dir, name)
    try:
        host_config = HostConfig.load(run_dir)
        checkpoints = Checkpoints(
            run_dir,
            settings,
            vqgan=None if host_config.vqgan is None else Path(host_config.vqgan),
            vqgan_fingerprint=host_config.vqgan_fingerprint,
            on_notice=status.notice,
        )
        heldout = heldout_batch(settings, run_dir / "tokenizer.json", status.notice, arguments.device)
        checkpointer = Checkpointer(
            settings,
            checkpoints,
            heldout,
            device=arguments.device,
            on_notice=status.notice,
            on_change=lambda: status.tell(
                heldout_loss=checkpointer.heldout_loss,
                checkpoint=checkpointer.saved_step,
                failed_saves=checkpoints.failed,
            ),
            stopped=lambda: wait(0),
        )
        model = build_model(settings)
        found = checkpointer.restore(model)
        scale = settings.steps_per_epoch
        status.tell(step=found[0] if found else 0, checkpoint=checkpointer.saved_step)

        def step_of(optimizer: Any) -> int:
            step: int = optimizer.local_epoch * scale
            return step

        def on_round(optimizer: Any) -> None:
            status.tell(step=step_of(optimizer), trainers=trainers_of(optimizer))
            if step_of(optimizer) >= settings.total_steps:
                finished.set()

        finished = threading.Event()
        run_donor(
            settings,
            dht,
            lambda seconds: finished.is_set() or wait(seconds),
            lambda optimizer: checkpointer.look(step_of(optimizer), optimizer, model),
            model=model,
            heldout=heldout,
            begin_with=None if found is None else (found[0] // scale, found[1]),
            on_round=on_round,
            on_leave=lambda optimizer: checkpointer.close(step_of(optimizer), optimizer, model, wait),
            on_notice=status.notice,
        )
        status.tell(finished=checkpointer.is_finished)
    finally:
        dht.shutdown()


def enter(run_dir: Path, name: str) -> tuple[Any, Any]:
    """The run's settings, and a node of the host's own at its fixed place."""
    from training.swarm.config import read_settings
    from training.swarm.host.host_config import HostConfig, identity_path
    from training.swarm.host.run_setup import bring_up_to_date
    from training.swarm.network.dht import open_dht
    from training.swarm.observe.peer_metrics import protect_records

    host_config = HostConfig.load(run_dir)
    if host_config.helper_of:
        bring_up_to_date(run_dir, host_config.helper_of)
    port = host_config.ports[name]
    dht = open_dht(
        host_config.helper_of or company(run_dir, host_config, name),
        client_mode=False,
        listen=[f"/ip4/{host_config.listen}/tcp/{port}"],
        announce=[f"/ip4/{host_config.announce}/tcp/{port}"],
        identity=identity_path(run_dir, name),
    )
    settings = read_settings(run_dir)
    protect_records(dht, settings.run_id)
    return settings, dht


def company(run_dir: Path, host_config: Any, name: str) -> list[str]:
    """Addresses of the host's other peers that are there.

    Only the first helper begins alone, so that there are never two networks of one run; the others wait for somebody.
    """
    others = [other for other in host_config.ports if other != name]
    present = [other for other in others if host_config.is_up(other)]
    deadline = time.monotonic() + COMPANY_TIMEOUT_S
    while not present and name != host_config.helpers[0]:
        if time.monotonic() > deadline:
            raise UserError(f"none of {', '.join(others)} takes connections; {name} does not begin alone")
        time.sleep(POLL_S)
        present = [other for other in others if host_config.is_up(other)]
    return [host_config.local_address(run_dir, other) for other in present]


def trainers_of(optimizer: Any) -> int:
    """As this peer counts them."""
    trainers: int = optimizer.tracker.trainers
    return trainers


ROLES: dict[str, Callable[..., None]] = {"helper": be_helper, "donor": be_donor}

if __name__ == "__main__":
    main()
