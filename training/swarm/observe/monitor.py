"""What a run does, from outside: the records of its peers, put together and kept."""

import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from dalle_lean.require import require
from training.run.metrics import NAME as METRICS
from training.run.metrics import MetricsLog, read_metrics
from training.run.progress import OnNotice
from training.swarm.config import SwarmSettings, read_settings
from training.swarm.network.bootstrap_service import fetch_settings
from training.swarm.network.dht import open_dht
from training.swarm.observe.peer_metrics import PeerRecord, PeerRecords, read_records

CONTRIBUTIONS = "contributions.json"
RUN = "run.json"
PACE_STEPS = 20
SILENT_LOOKS = 3
"""After so many in which nobody was heard of, the run is looked for anew."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A run at one moment; `step` and `total_steps` are of its schedule.

    Medians and sums are over the trainers that are there. `samples_per_s` follows from the pace of the steps, and is
    None before there were two; `reported_samples_per_s` is what the peers say.
    """

    step: int
    total_steps: int
    loss: float | None
    peers: int
    clients: int
    samples_per_s: float | None
    reported_samples_per_s: float
    left_s: float | None
    dropped_batches: int
    dropped_tensors: int
    skipped_steps: int
    solo_steps: int
    resyncs: int
    refused_records: int

    def metrics(self) -> dict[str, float]:
        """What is written down."""
        return {name: value for name, value in asdict(self).items() if name not in SHOWN_ONLY and value is not None}


SHOWN_ONLY = ("step", "total_steps", "left_s")


class StepPace:
    """How fast steps follow each other, from the last ones that were seen."""

    def __init__(self) -> None:
        self.seen: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)

    def note(self, step: int, now_s: float) -> None:
        """The run is at `step`; where it went back, the pace begins anew."""
        if self.seen and step < self.seen[-1][1]:
            self.seen.clear()
        if not self.seen or step > self.seen[-1][1]:
            self.seen.append((now_s, step))

    @property
    def steps_per_s(self) -> float | None:
        """None before two steps were seen."""
        if len(self.seen) < 2:
            return None
        (first_s, first), (last_s, last) = self.seen[0], self.seen[-1]
        return (last - first) / (last_s - first_s)


@dataclass
class Contributor:
    """A peer's samples over all its starts."""

    user: str | None = None
    earlier_samples: int = 0
    """Of the starts before the present one."""
    started: float = 0.0
    samples: int = 0
    """Since `started`."""
    seen: float = 0.0
    """When its last record was written."""

    @property
    def total_samples(self) -> int:
        return self.earlier_samples + self.samples


class Leaderboard:
    """Who gave how much, kept in OUT/contributions.json: it outlives the peers and the monitor.

    The numbers are the peers' own; a peer is known by its peer id. ValueError where the file is another run's.
    """

    def __init__(self, path: Path, run: str):
        self.path, self.run = path, run
        saved: dict[str, Any] = read_json(path) if path.exists() else {"run": run, "peers": {}}
        if saved["run"] != run:
            raise UserError(f"{path} is of the run {saved['run']!r}, not of {run!r}; name another folder with --out")
        self.peers = {peer: Contributor(**content) for peer, content in saved["peers"].items()}

    def update(self, records: Mapping[str, PeerRecord]) -> None:
        """Take in what peers say, and write it down where it is news."""
        news = False
        for peer, record in records.items():
            known = self.peers.get(peer, Contributor())
            if record.time > known.seen and (record.samples or peer in self.peers):
                self.peers[peer] = credited(known, record)
                news = True
        if news:
            write_json(self.path, {"run": self.run, "peers": {name: asdict(peer) for name, peer in self.peers.items()}})

    def ranked(self) -> list[tuple[str, Contributor]]:
        """Those who gave most first."""
        return sorted(self.peers.items(), key=lambda item: -item[1].total_samples)


def credited(known: Contributor, record: PeerRecord) -> Contributor:
    """The peer with a newer record: a new start counts from zero, what was before it stays."""
    again = record.started != known.started
    return Contributor(
        user=record.user,
        earlier_samples=known.total_samples if again else known.earlier_samples,
        started=record.started,
        samples=record.samples if again else max(known.samples, record.samples),
        seen=record.time,
    )


def summarize(records: PeerRecords, settings: SwarmSettings, steps_per_s: float | None) -> Overview | None:
    """The run at this moment; None where no trainer is there.

    Where it is and its loss are medians over the trainers, that less than half of them cannot move by what they say.
    """
    trainers = [record for record in records.by_peer.values() if record.role == "trainer"]
    if not trainers:
        return None
    step = statistics.median_low(record.step for record in trainers) * settings.steps_per_epoch
    batch_size = settings.recipe.data.batch_size
    losses = [record.loss for record in trainers if record.loss is not None]
    reported = sum(record.samples_per_s for record in trainers)
    pace = steps_per_s or reported / batch_size
    return Overview(
        step=step,
        total_steps=settings.total_steps,
        loss=statistics.median(losses) if losses else None,
        peers=len(trainers),
        clients=sum(record.client_mode for record in trainers),
        samples_per_s=None if steps_per_s is None else steps_per_s * batch_size,
        reported_samples_per_s=reported,
        left_s=max(0, settings.total_steps - step) / pace if pace else None,
        dropped_batches=sum(record.dropped_batches for record in trainers),
        dropped_tensors=sum(record.dropped_tensors for record in trainers),
        skipped_steps=sum(record.skipped_steps for record in trainers),
        solo_steps=sum(record.solo_steps for record in trainers),
        resyncs=sum(record.resyncs for record in trainers),
        refused_records=records.refused,
    )


class Outputs:
    """OUT/metrics.jsonl, OUT/tensorboard/ and, where a project is named, Weights & Biases; one entry for each step.

    A run that was taken back to a checkpoint goes on under another run id: then what was written beyond it is removed.
    """

    def __init__(self, out: Path, wandb_project: str | None = None):
        self.out, self.wandb_project = out, wandb_project
        self.wandb: Any = None if wandb_project is None else require("wandb", extra="wandb")
        out.mkdir(parents=True, exist_ok=True)
        self.run_id: str | None = read_json(out / RUN)["run_id"] if (out / RUN).exists() else None
        self.step = max((line["step"] for line in read_metrics(out / METRICS)), default=0)
        self.log: MetricsLog | None = None

    def write(self, overview: Overview, run_id: str) -> None:
        """Record the run at a step that it had not reached before."""
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
        """Write out what is still held back."""
        if self.log is not None:
            self.log.close()
            self.log = None
            if self.wandb is not None:
                self.wandb.finish()


class Monitor:
    """Follows a run as a node in client mode that takes no part in it.

    Args:
        source: an address of one of its helpers, or its swarm.toml.
        on_notice: called with a line where something is worth saying.

    Raises ValueError where no helper answers.
    """

    def __init__(self, source: str, on_notice: OnNotice):
        self.on_notice = on_notice
        given = None if source.startswith("/") and "/p2p/" in source else read_settings(Path(source))
        self.addresses = (source,) if given is None else given.swarm.addresses
        if not self.addresses:
            raise UserError(f"{source} names no address of the run; give one, as `dalle-lean host` prints it")
        self.dht = open_dht(self.addresses, client_mode=True)
        self.pace, self.silent_looks = StepPace(), 0
        settings = self.newest_settings() or given
        if settings is None:
            self.dht.shutdown()
            raise UserError(f"{source} does not hand out the run's swarm.toml")
        self.settings = settings
        self.addresses = tuple(dict.fromkeys((*self.addresses, *settings.swarm.addresses)))

    def newest_settings(self) -> SwarmSettings | None:
        """As a helper hands them out now; None where none does."""
        for address in self.addresses:
            try:
                return fetch_settings(self.dht, address)
            except ValueError as error:
                self.on_notice(str(error))
        return None

    def look(self) -> tuple[PeerRecords, Overview | None]:
        """The records that are there, and what they say together; None where no trainer is heard of."""
        try:
            records = read_records(self.dht, self.settings.run_id)
        except TimeoutError:
            records = PeerRecords({}, 0)
        overview = summarize(records, self.settings, None)
        if overview is None:
            self.silent_looks += 1
            if self.silent_looks % SILENT_LOOKS == 0:
                self.search_again()
            return records, None
        self.silent_looks = 0
        self.pace.note(overview.step, time.monotonic())
        return records, summarize(records, self.settings, self.pace.steps_per_s)

    def search_again(self) -> None:
        """Meet the run anew: its helpers may have been away, or it may have been taken back to a checkpoint."""
        try:
            fresh = open_dht(self.addresses, client_mode=True)
        except ValueError as error:
            self.on_notice(str(error))
            return
        self.dht.shutdown()
        self.dht = fresh
        settings = self.newest_settings()
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
