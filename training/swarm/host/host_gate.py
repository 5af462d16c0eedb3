"""The gates of the host's own peers: which keys and passes they have, and the desks of helpers."""

from pathlib import Path

import hivemind

from training.swarm.admission.bans import NAME as BANS
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.passes import HELPER
from training.swarm.admission.service import DeskPlace, Renewal, begin_admission, issue_own
from training.swarm.config import SwarmSettings
from training.swarm.host.host_config import IDENTITIES, HostConfig, peer_id

RUN_KEY, HELPER_KEY = "run.key", "helper.key"
"""In identities/: the run's private key, and that of a helper elsewhere."""
PASSES = "passes"


def role_in(name: str) -> str:
    """The role of the host's peer of that name."""
    return name.partition("-")[0]


def run_key_file(run_dir: Path) -> Path:
    return run_dir / IDENTITIES / RUN_KEY


def host_gate(run_dir: Path, settings: SwarmSettings, name: str) -> Gate:
    """The gate of one of the host's peers."""
    return Gate(settings.swarm.run_key, run_dir / PASSES / name, run_dir / BANS)


def host_gate_with_pass(run_dir: Path, settings: SwarmSettings, name: str) -> Gate:
    """The same, with a new pass if this machine has the run's key; a helper elsewhere has got one from the host."""
    gate = host_gate(run_dir, settings, name)
    if run_key_file(run_dir).exists():
        issue_own(gate, SigningKey.load(run_key_file(run_dir)), peer_id(run_dir, name), role_in(name))
    return gate


def begin_host_admission(dht: hivemind.DHT, run_dir: Path, settings: SwarmSettings, name: str) -> None:
    """Keep up with passes and bans; a helper also admits newcomers."""
    host_config = HostConfig.load(run_dir)
    run_key = run_key_file(run_dir)
    renewal = Renewal(host_config.helper_of, run_key if run_key.exists() else None)
    place = None
    if role_in(name) == HELPER:
        place = DeskPlace(
            policy=settings.swarm.admission,
            folder=run_dir,
            key_file=renewal.run_key_file or run_dir / IDENTITIES / HELPER_KEY,
            peer_list=None if host_config.peer_list is None else Path(host_config.peer_list),
        )
    begin_admission(dht, renewal, place)
