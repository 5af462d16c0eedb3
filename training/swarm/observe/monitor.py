"""A run seen from outside: the records of its peers, summarized and logged."""

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import hivemind

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from dalle_lean.progress import OnNotice
from dalle_lean.require import require
from training.run.metrics import NAME as METRICS
from training.run.metrics import MetricsLog, read_metrics
from training.swarm.admission.gate import Gate
from training.swarm.admission.newcomer import IDENTITY, enter_by_pass
from training.swarm.admission.service import Renewal, begin_admission, counts_of
from training.swarm.averaging.attestation import Credit, parse_credits
from training.swarm.config import SwarmSettings, read_settings
from training.swarm.host.host_gate import run_key_file
from training.swarm.network.addresses import addresses_of, peer_of
from training.swarm.network.bootstrap_service import credits_name, fetch_public, fetch_settings, first_answer
from training.swarm.network.dht import open_dht
from training.swarm.observe.peer_metrics import PeerRecord, PeerRecords, read_records

CONTRIBUTIONS = "contributions.json"
RUN = "run.json"
PACE_STEPS = 20
MOST_CONTRIBUTORS = 4096
"""Those with the fewest samples are dropped."""
SILENT_POLLS = 3
"""Polls without any trainer before the monitor reconnects."""
COUNTERS = ("dropped_batches", "dropped_tensors", "skipped_steps", "solo_steps", "resyncs")
"""Of a PeerRecord."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A run at one moment; `step` and `total_steps` are the schedule's.

    Medians and sums are over the trainers present. `samples_per_s` follows from the pace of the steps, None before two
    were seen; `reported_samples_per_s` is what the peers claim.
    """

    step: int
    total_steps: int
    loss: float | None
    heldout_loss: float | None
    """As the run's donors publish it."""
    peers: int
    clients: int
    samples_per_s: float | None
    reported_samples_per_s: float
    left_s: float | None
    counters: dict[str, int]
    """Sums of what each of COUNTERS counts, `refused_records`, and what the helpers count of passes and bans."""

    def metrics(self) -> dict[str, float]:
        """The numbers for the logs."""
        names = ("loss", "heldout_loss", "peers", "clients", "samples_per_s", "reported_samples_per_s")
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**known, **self.counters}


class StepPace:
    """Steps per second over the latest PACE_STEPS observed steps."""

    def __init__(self) -> None:
        self.observed: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)

    def observe(self, step: int, now_s: float) -> None:
        """The run is at `step`; going back resets the pace."""
        if self.observed and step < self.observed[-1][1]:
            self.observed.clear()
        if not self.observed or step > self.observed[-1][1]:
            self.observed.append((now_s, step))

    @property
    def steps_per_s(self) -> float | None:
        """None before two steps were observed."""
        if len(self.observed) < 2:
            return None
        (first_s, first), (last_s, last) = self.observed[0], self.observed[-1]
        return (last - first) / (last_s - first_s)


@dataclass
class Contributor:
    """A peer's samples over all its sessions."""

    user: str | None = None
    earlier_samples: int = 0
    """From sessions before the current one."""
    started: float = 0.0
    samples: int = 0
    """Since `started`, in the current session."""
    seen: float = 0.0
    """When its latest record was written."""
    averaged_samples: float = 0.0
    """That the run's helpers averaged into steps."""
    averaged_s: float = 0.0
    """Seconds of the steps that it took part in, by the helpers' clocks."""

    @property
    def total_samples(self) -> int:
        return self.earlier_samples + self.samples


class Leaderboard:
    """Samples by peer id in OUT/contributions.json, which outlives the peers and the monitor.

    The samples are the peers' own claims, but for those averaged. ValueError if the file belongs to another run.
    """

    def __init__(self, path: Path, run: str):
        self.path, self.run = path, run
        saved: dict[str, Any] = read_json(path) if path.exists() else {"run": run, "peers": {}}
        if saved["run"] != run:
            raise UserError(f"{path} is of the run {saved['run']!r}, not of {run!r}; name another folder with --out")
        self.peers = {peer: Contributor(**content) for peer, content in saved["peers"].items()}

    def update(self, records: Mapping[str, PeerRecord], credits: Mapping[str, Credit] | None = None) -> None:
        """Add what peers report and what helpers averaged, and write the file if anything changed."""
        changed = False
        for peer, record in records.items():
            known = self.peers.get(peer, Contributor())
            if record.time > known.seen and (record.samples or peer in self.peers):
                self.peers[peer] = credited(known, record)
                changed = True
        for peer, credit in (credits or {}).items():
            known = self.peers.get(peer, Contributor())
            if credit.samples > known.averaged_samples:
                self.peers[peer] = replace(known, averaged_samples=credit.samples, averaged_s=credit.seconds)
                changed = True
        if changed:
            self.peers = dict(self.ranked()[:MOST_CONTRIBUTORS])
            write_json(self.path, {"run": self.run, "peers": {name: asdict(peer) for name, peer in self.peers.items()}})

    def ranked(self) -> list[tuple[str, Contributor]]:
        """Most averaged samples first; of equals, and where no helper counts, most claimed ones."""
        return sorted(self.peers.items(), key=lambda item: (-item[1].averaged_samples, -item[1].total_samples))


def credited(known: Contributor, record: PeerRecord) -> Contributor:
    """The peer with a newer record, whose samples count from zero if it starts a new session."""
    restarted = record.started != known.started
    return replace(
        known,
        user=record.user,
        earlier_samples=known.total_samples if restarted else known.earlier_samples,
        started=record.started,
        samples=record.samples if restarted else max(known.samples, record.samples),
        seen=record.time,
    )


def summarize(
    records: PeerRecords,
    settings: SwarmSettings,
    steps_per_s: float | None,
    credits: Mapping[str, Credit] = MappingProxyType({}),
    admission: Mapping[str, int] = MappingProxyType({}),
) -> Overview | None:
    """The run at this moment; None without trainers. `admission`: what the helpers count, see `counts_of`.

    Its step and loss are medians over the trainers, which less than half of them cannot move with false claims. Once
    helpers have averaged the gradients of some trainers present, only those count: identities cost nothing.
    """
    by_peer = {peer: record for peer, record in records.by_peer.items() if record.role == "trainer"}
    trainers = [record for peer, record in by_peer.items() if peer in credits] or list(by_peer.values())
    if not trainers:
        return None
    donors = [records.by_peer[peer] for peer in settings.swarm.donors if peer in records.by_peer]
    heldout = [record.loss for record in donors if record.role == "donor" and record.loss is not None]
    step = statistics.median_low(record.step for record in trainers) * settings.steps_per_epoch
    batch_size = settings.recipe.data.batch_size
    losses = [record.loss for record in trainers if record.loss is not None]
    reported = sum(record.samples_per_s for record in trainers)
    pace = steps_per_s or reported / batch_size
    return Overview(
        step=step,
        total_steps=settings.total_steps,
        loss=statistics.median_low(losses) if losses else None,
        heldout_loss=statistics.median_low(heldout) if heldout else None,
        peers=len(trainers),
        clients=sum(record.client_mode for record in trainers),
        samples_per_s=None if steps_per_s is None else steps_per_s * batch_size,
        reported_samples_per_s=reported,
        left_s=max(0, settings.total_steps - step) / pace if pace else None,
        counters={
            **{name: sum(getattr(record, name) for record in trainers) for name in COUNTERS},
            "refused_records": records.refused,
            **admission,
        },
    )


class Outputs:
    """OUT/metrics.jsonl, OUT/tensorboard/ and, given a project, Weights & Biases; one entry per step.

    A run rolled back to a checkpoint gets another run id: entries beyond that checkpoint are then removed.
    """

    def __init__(self, out: Path, wandb_project: str | None = None):
        self.out, self.wandb_project = out, wandb_project
        self.wandb: Any = None if wandb_project is None else require("wandb", extra="wandb")
        out.mkdir(parents=True, exist_ok=True)
        self.run_id: str | None = read_json(out / RUN)["run_id"] if (out / RUN).exists() else None
        self.step = max((line["step"] for line in read_metrics(out / METRICS)), default=0)
        self.log: MetricsLog | None = None

    def write(self, overview: Overview, run_id: str) -> None:
        """Log the run unless its step is logged already."""
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
        """Flush and close."""
        if self.log is not None:
            self.log.close()
            self.log = None
            if self.wandb is not None:
                self.wandb.finish()


class Monitor:
    """Follows a run as a node in client mode, without taking part.

    Args:
        sources: addresses of its helpers, or its swarm.toml.
        on_notice: called with one line when something is wrong.

    Raises ValueError if no helper answers.
    """

    def __init__(self, sources: Sequence[str], on_notice: OnNotice):
        self.on_notice = on_notice
        self.gate: Gate | None = None
        self.identity: Path | None = None
        self.run_key_file: Path | None = None
        self.addresses, given = addresses_of(sources), None
        if not self.addresses:
            path = Path(sources[0])
            given = read_settings(path)
            self.addresses = given.swarm.addresses
            self.run_key_file = run_key_file(path if path.is_dir() else path.parent)
        if not self.addresses:
            raise UserError(f"{sources[0]} names no address of the run; give one, as `dalle-lean host` prints it")
        self.dht = open_dht(self.addresses, client_mode=True, only_asks=True)
        self.pace, self.silent_polls = StepPace(), 0
        self.credits: dict[str, Credit] = {}
        """By peer id, as of the latest `fetch_credits`."""
        settings = self.fetch_settings() or given
        if settings is None:
            self.dht.shutdown()
            raise UserError(f"no helper of {', '.join(sources)} hands out the run's swarm.toml")
        self.settings = settings
        self.addresses = tuple(dict.fromkeys((*self.addresses, *settings.swarm.addresses)))

    def enter(self, folder: Path, code: str = "") -> None:
        """Get a pass, if the run has a key: only those who have one can read its records.

        Args:
            folder: keeps this monitor's identity and pass.
            code: of the host's invitation, the first time.

        Raises Refused, and ValueError if no helper answers. The host needs no code where its run.key is.
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
        dht = open_dht(self.addresses, client_mode=True, identity=self.identity, gate=self.gate)
        if self.gate is not None:
            begin_admission(dht, Renewal(self.addresses))
        return dht

    def fetch_settings(self) -> SwarmSettings | None:
        """From the first helper that answers; None if none does."""
        for address in self.addresses:
            try:
                return fetch_settings(self.dht, address)
            except ValueError as error:
                self.on_notice(str(error))
        return None

    def fetch_public(self, name: str) -> bytes | None:
        """A public file of the run, from the first of its helpers that has it; None if none does."""
        return first_answer(self.dht, self.addresses, partial(fetch_public, name=name))

    def fetch_credits(self) -> None:
        """Find out what the run's own helpers averaged; of what several of them saw, the most counts."""
        for address in self.settings.swarm.addresses:
            try:
                found = parse_credits(fetch_public(self.dht, address, credits_name(peer_of(address))).decode())
            except ValueError:  # it is away, or has averaged nothing yet
                continue
            for peer, credit in found.items():
                self.credits[peer] = max(credit, self.credits.get(peer, Credit()), key=lambda known: known.samples)

    def poll(self) -> tuple[PeerRecords, Overview | None]:
        """The current records and their summary, which is None without trainers."""
        try:
            records = read_records(self.dht, self.settings.run_id)
        except TimeoutError:
            records = PeerRecords({}, 0)
        counts = {} if self.gate is None else counts_of(self.dht, self.settings.swarm.addresses)
        summary = partial(summarize, records, self.settings, admission=counts, credits=self.credits)
        overview = summary(steps_per_s=None)
        if overview is None:
            self.silent_polls += 1
            if self.silent_polls % SILENT_POLLS == 0:
                self.reconnect()
            return records, None
        self.silent_polls = 0
        self.pace.observe(overview.step, time.monotonic())
        return records, summary(steps_per_s=self.pace.steps_per_s)

    def reconnect(self) -> None:
        """Find the run again: its helpers may have been away, or it may have been rolled back to a checkpoint."""
        try:
            fresh = self.open_node()
        except ValueError as error:
            self.on_notice(str(error))
            return
        self.dht.shutdown()
        self.dht = fresh
        settings = self.fetch_settings()
        if settings is not None and settings.run_id != self.settings.run_id:
            self.on_notice(f"the run goes on as {settings.run_id}")
            self.settings, self.pace = settings, StepPace()

    def close(self) -> None:
        """Leave the DHT."""
        self.dht.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
