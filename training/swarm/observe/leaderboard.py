"""Contributions over all sessions: the samples that helpers averaged, and those that peers claim."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dalle_lean.errors import UserError
from dalle_lean.io.files import read_json, write_json
from training.swarm.averaging.attestation import Credit
from training.swarm.observe.peer_metrics import PeerRecord

CONTRIBUTIONS = "contributions.json"
MOST_CONTRIBUTORS = 4096  # the peers with the fewest samples are dropped


@dataclass
class Contributor:
    """A peer's contribution over all its sessions."""

    user: str | None = None
    earlier_samples: int = 0  # claimed in sessions before the current one
    started: float = 0.0
    samples: int = 0  # claimed in the current session, since `started`
    seen: float = 0.0  # when its latest record was written
    averaged_samples: float = 0.0  # samples that the run's helpers averaged into steps
    averaged_s: float = 0.0  # seconds of the steps that it took part in, measured by the helpers

    @property
    def total_samples(self) -> int:
        return self.earlier_samples + self.samples


class Leaderboard:
    """Contributions by peer id in OUT/contributions.json, which outlives the peers and the monitor.

    All but the averaged samples are the peers' own claims. ValueError if the file belongs to another run.
    """

    def __init__(self, path: Path, run: str):
        self.path, self.run = path, run
        saved: dict[str, Any] = read_json(path) if path.exists() else {"run": run, "peers": {}}
        if saved["run"] != run:
            raise UserError(f"{path} belongs to the run {saved['run']!r}, not {run!r}; name another folder with --out")
        self.peers = {peer: Contributor(**content) for peer, content in saved["peers"].items()}

    def update(self, records: Mapping[str, PeerRecord], credits: Mapping[str, Credit] | None = None) -> None:
        """Add the peers' reports and the helpers' credits, and write the file if anything changed."""
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
        """Contributors by averaged samples, then by claimed samples, most first."""
        return sorted(self.peers.items(), key=lambda item: (-item[1].averaged_samples, -item[1].total_samples))


def credited(known: Contributor, record: PeerRecord) -> Contributor:
    """The contributor after a newer record, whose samples start from zero in a new session."""
    restarted = record.started != known.started
    return replace(
        known,
        user=record.user,
        earlier_samples=known.total_samples if restarted else known.earlier_samples,
        started=record.started,
        samples=record.samples if restarted else max(known.samples, record.samples),
        seen=record.time,
    )
