"""The gates of the host's own peers: their keys and passes, and the helpers' pass issuers."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import hivemind

from dalle_lean.errors import UserError
from training.swarm.admission.bans import BANS, change_bans
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.pass_issuer import PassIssuer
from training.swarm.admission.passes import HELPER
from training.swarm.admission.service import begin_admission, issue_own
from training.swarm.averaging.complaints import EVIDENCE, read_evidence
from training.swarm.config import SwarmSettings
from training.swarm.host.host_config import IDENTITIES, HostConfig, peer_id, role_in

RUN_KEY, HELPER_KEY = "run.key", "helper.key"
"""Files in identities/: the run's private key, and the key of a helper that runs elsewhere."""
PASSES = "passes"


def run_key_file(run_dir: Path) -> Path:
    return run_dir / IDENTITIES / RUN_KEY


def host_gate(run_dir: Path, settings: SwarmSettings, name: str) -> Gate:
    return Gate(settings.swarm.run_key, run_dir / PASSES / name, run_dir / BANS)


def host_gate_with_pass(run_dir: Path, settings: SwarmSettings, name: str) -> Gate:
    """The gate, with a new pass if this machine has the run's key; a helper elsewhere gets its pass from the host.

    OSError if no pass can be written, such as on a full disk, and the old one has ended.
    """
    gate = host_gate(run_dir, settings, name)
    if run_key_file(run_dir).exists():
        try:
            issue_own(gate, SigningKey.load(run_key_file(run_dir)), peer_id(run_dir, name), role_in(name))
        except OSError:
            if not gate.has_pass:
                raise
    return gate


def begin_host_admission(dht: hivemind.DHT, run_dir: Path, settings: SwarmSettings, name: str) -> None:
    """Keep passes and bans up to date; a helper also admits newcomers."""
    host_config, make_issuer = HostConfig.load(run_dir), None
    run_key = run_key_file(run_dir) if run_key_file(run_dir).exists() else None
    if role_in(name) == HELPER:
        make_issuer = partial(
            PassIssuer,
            policy=settings.swarm.admission,
            folder=run_dir,
            key_file=run_key or run_dir / IDENTITIES / HELPER_KEY,
            peer_list=None if host_config.peer_list is None else Path(host_config.peer_list),
        )
    begin_admission(dht, host_config.helper_of, run_key_file=run_key, make_issuer=make_issuer)


def ban_proven(run_dir: Path) -> list[str]:
    """Ban reducers whose own signatures prove that they lied, if this machine has the run's key; returns notices.

    Each proof is used once, so that the host can unban them.
    """
    lines, key = [], run_key_file(run_dir)
    for path in sorted((run_dir / EVIDENCE).glob("*.json")):
        with suppress(OSError):  # another helper was first, or the disk is full: the next round tries again
            try:
                peer = str(read_evidence(path))
            except UserError as error:
                lines.append(str(error))
                path.replace(path.with_suffix(".bad"))
                continue
            done = "is banned" if key.exists() else "should be banned by the run's host"
            try:
                if key.exists():
                    change_bans(run_dir, SigningKey.load(key), peer, banned=True)
            except UserError as error:  # the list is full
                done = f"is not banned ({error})"
            kept = path.replace(path.with_suffix(".read"))  # afterwards: no kill loses the ban
            lines.append(f"{peer} {done}: it signed two different averages of the same tensors; the proof is in {kept}")
    return lines
