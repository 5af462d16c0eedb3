"""Monitors a run through its helpers, and logs its progress."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import hivemind

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from dalle_lean.progress import OnNotice, silent
from dalle_lean.require import require
from training.run.metrics import NAME as METRICS
from training.run.metrics import MetricsLog, read_metrics
from training.swarm.admission.gate import Gate
from training.swarm.admission.service import IDENTITY, begin_admission, counts_of, enter_by_pass
from training.swarm.averaging.attestation import Credit, merge, parse_credits
from training.swarm.config import SwarmSettings, read_settings
from training.swarm.host.host_gate import run_key_file
from training.swarm.network.addresses import addresses_of, is_listening_at, peer_of
from training.swarm.network.bootstrap_service import (
    call_each,
    credits_name,
    fetch_public,
    fetch_settings,
    first_answer,
)
from training.swarm.network.dht import CONNECT_TIMEOUT_S, open_dht
from training.swarm.observe.overview import Overview, StepPace, summarize
from training.swarm.observe.peer_metrics import PeerRecords, read_records

RUN = "run.json"
CREDITS_INTERVAL_S = 30.0  # a large run's take some 100 kB
SILENT_POLLS = 3  # polls without any trainer before the monitor reconnects


class Outputs:
    """The logs: OUT/metrics.jsonl, OUT/tensorboard/ and, given a project, Weights & Biases; one entry per step.

    A rollback changes the run id: entries after its checkpoint are then removed.
    """

    def __init__(self, out: Path, wandb_project: str | None = None):
        self.out, self.wandb_project = out, wandb_project
        self.wandb: Any = None if wandb_project is None else require("wandb", extra="wandb")
        out.mkdir(parents=True, exist_ok=True)
        self.run_id: str | None = read_json(out / RUN)["run_id"] if (out / RUN).exists() else None
        self.step = max((line["step"] for line in read_metrics(out / METRICS)), default=0)
        self.log: MetricsLog | None = None

    def write(self, overview: Overview, run_id: str) -> None:
        """Log the run unless its step is already logged."""
        if run_id != self.run_id:
            self.close()
            self.step = min(self.step, overview.step - 1)
            write_json(self.out / RUN, {"run_id": run_id})
            self.run_id = run_id
        if overview.step <= self.step:
            return
        if self.log is None:
            self.log = MetricsLog(self.out, self.step)
            if self.wandb is not None:
                self.wandb.init(project=self.wandb_project, id=run_id, name=run_id, dir=str(self.out), resume="allow")
        self.step = overview.step
        self.log.write(overview.step, **overview.metrics())
        if self.wandb is not None:
            self.wandb.log(overview.metrics(), step=overview.step)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
            self.log = None
            if self.wandb is not None:
                self.wandb.finish()


class Monitor:
    """Follows a run as a node in client mode, without taking part.

    Args:
        sources: addresses of its helpers, or its swarm.toml.
        run_dir: the run's folder, if this machine hosts it; by default that of the swarm.toml.
        on_connect: called with a line before connecting, which may take a while.

    Raises ValueError if no helper answers.
    """

    def __init__(
        self, sources: Sequence[str], on_notice: OnNotice, run_dir: Path | None = None, on_connect: OnNotice = silent
    ):
        self.on_notice = on_notice
        self.gate: Gate | None = None
        self.identity: Path | None = None
        self.addresses, given = addresses_of(sources), None
        if not self.addresses:
            path = Path(sources[0])
            given = read_settings(path)
            self.addresses = given.swarm.addresses
            run_dir = run_dir or (path if path.is_dir() else path.parent)
        if not self.addresses:
            raise UserError(f"{sources[0]} names no address of the run; pass one that `dalle-lean host` printed")
        key_file = None if run_dir is None else run_key_file(run_dir)
        self.run_key_file = key_file if key_file is not None and key_file.exists() else None
        on_connect(f"connecting to {', '.join(self.addresses)}, up to {CONNECT_TIMEOUT_S:.0f} s ...")
        self.dht = open_dht(self.addresses, client_mode=True, must_bootstrap=False, reads_all=True)
        self.pace, self.silent_polls = StepPace(), 0
        self.credits: dict[str, Credit] = {}  # by peer id, from the latest `fetch_credits`
        self.credits_due_s = 0.0
        self.helper_credits: dict[str, dict[str, Credit]] = {}  # the latest of each helper, by its peer id
        settings = self.fetch_settings() or given
        if settings is None:
            self.dht.shutdown()
            raise UserError(f"no helper of {', '.join(sources)} serves the run's swarm.toml; is the host up?")
        self.settings = settings
        self.addresses = tuple(dict.fromkeys((*self.addresses, *settings.swarm.addresses)))

    def enter(self, folder: Path, code: str = "") -> None:
        """Get a pass if the run has a key, without which nobody can read its records.

        Args:
            folder: stores this monitor's identity and pass.
            code: of the host's invitation, the first time; the machine with the run's key needs none.

        Raises Refused, and ValueError if no helper answers.
        """
        if self.settings.swarm.run_key:
            self.gate = enter_by_pass(
                self.dht, self.addresses, self.settings, folder, code=code, run_key_file=self.run_key_file
            )
            self.identity = folder / IDENTITY
            self.dht.shutdown()
            self.dht = self.open_node()

    def open_node(self) -> hivemind.DHT:
        """A node in client mode; ValueError if no helper answers."""
        dht = open_dht(self.addresses, client_mode=True, identity=self.identity, gate=self.gate, reads_all=True)
        if self.gate is not None:
            begin_admission(dht, self.addresses, run_key_file=self.run_key_file)
        return dht

    def fetch_settings(self) -> SwarmSettings | None:
        """The run's settings, from the first helper that answers; None if none does."""
        for address in self.addresses:
            try:
                return fetch_settings(self.dht, address)
            except ValueError as error:
                self.on_notice(str(error))
        return None

    def fetch_public(self, name: str, start: int = 0) -> bytes | None:
        """A chunk of a public file, from the first helper that has it; None if none does."""
        return first_answer(self.dht, self.addresses, partial(fetch_public, name=name, start=start))

    def fetch_credits(self) -> None:
        """Fetch the helpers' credits, and merge those of each peer."""
        names = {address: credits_name(peer_of(address)) for address in self.settings.swarm.addresses}
        # One that is offline, or has not averaged anything yet, is missing: what it last said counts.
        for address, content in call_each(self.dht, names, "rpc_read_public", is_json=False).items():
            with suppress(ValueError):
                self.helper_credits[peer_of(address)] = parse_credits(content.decode())
        by_peer: dict[str, list[Credit]] = defaultdict(list)
        for found in self.helper_credits.values():
            for peer, credit in found.items():
                by_peer[peer].append(credit)
        self.credits = {peer: merge(credits) for peer, credits in by_peer.items()}

    def poll(self) -> tuple[PeerRecords, Overview | None]:
        """The current records, and their summary or None without trainers; updates the credits if they are due."""
        if time.monotonic() >= self.credits_due_s:
            self.credits_due_s = time.monotonic() + CREDITS_INTERVAL_S
            self.fetch_credits()
        try:
            records = read_records(self.dht, self.settings.run_id)
        except TimeoutError:
            records = PeerRecords({}, 0)
        counts = {} if self.gate is None else counts_of(self.dht, self.settings.swarm.addresses)
        summary = partial(summarize, records, self.settings, admission=counts, credits=self.credits)
        overview = summary(steps_per_s=None)
        if overview is None:
            self.pace = StepPace()  # a pause is no pace
            self.silent_polls += 1
            if self.silent_polls % SILENT_POLLS == 0:
                self.reconnect()
            return records, None
        self.silent_polls = 0
        self.pace.observe(overview.step, time.monotonic())
        return records, summary(steps_per_s=self.pace.steps_per_s)

    def reconnect(self) -> None:
        """Open a new node: the helpers may have been offline, or the run may have been rolled back."""
        try:
            fresh = self.open_node()
        except ValueError as error:
            self.on_notice(str(error))
            return
        self.dht.shutdown()
        self.dht = fresh
        settings = self.fetch_settings()
        if settings is not None and settings.run_id != self.settings.run_id:
            self.on_notice(f"the run continues as {settings.run_id}")
            self.settings, self.pace = settings, StepPace()

    def is_answered(self) -> bool:
        """Whether a helper accepts connections."""
        return any(map(is_listening_at, self.addresses))

    def close(self) -> None:
        self.dht.shutdown()
