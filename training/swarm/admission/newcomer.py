"""A newcomer's side: its identity, its pass, and the gate that it joins with."""

from collections.abc import Sequence
from pathlib import Path

import hivemind

from training.swarm.admission.bans import NAME as BANS
from training.swarm.admission.desk import Application
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import SigningKey
from training.swarm.admission.passes import TRAINER
from training.swarm.admission.service import apply, issue_own
from training.swarm.config import SwarmSettings
from training.swarm.network.identity import make_identity, peer_id_in

IDENTITY, PASS = "identity", "pass"


def enter_by_pass(
    dht: hivemind.DHT,
    addresses: Sequence[str],
    settings: SwarmSettings,
    folder: Path,
    *,
    name: str = "",
    code: str = "",
    run_key_file: Path | None = None,
) -> Gate:
    """A gate with a pass for the identity in `folder`, which helpers at `addresses` give.

    Args:
        dht: any node that reaches them: a pass is useless to all but its peer.
        name: to show to people.
        code: of the host's invitation; not needed while an earlier pass in the folder holds.
        run_key_file: of the run's key, if this machine has it: then it needs nobody's pass.

    Raises Refused, and Unanswered if no helper answers.
    """
    make_identity(folder / IDENTITY)
    gate = Gate(settings.swarm.run_key, folder / PASS, folder / BANS)
    peer = peer_id_in(folder / IDENTITY)
    if run_key_file is not None and run_key_file.exists():
        issue_own(gate, SigningKey.load(run_key_file), peer, TRAINER)
    else:
        apply(dht, addresses, gate, Application(peer=peer, name=name, code=code))
    return gate
