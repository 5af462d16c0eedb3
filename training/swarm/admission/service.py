"""Passes and bans on the wire: the calls between peers, in the processes of their DHT nodes."""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hivemind
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2

from dalle_lean.errors import is_whole
from dalle_lean.io.files import write_bytes
from training.swarm.admission.bans import BANS
from training.swarm.admission.gate import Gate
from training.swarm.admission.keys import Forged, SigningKey
from training.swarm.admission.pass_issuer import Application, PassIssuer
from training.swarm.admission.passes import HELPER, TRAINER, VALIDITY_S, Pass, Refused, decoded, encoded
from training.swarm.config import SwarmSettings
from training.swarm.network.addresses import make_identity, peer_id_in, peer_of
from training.swarm.network.bootstrap_service import Unanswered, ask, call, call_each, hosts_of
from training.swarm.network.node import run_until_shutdown

IDENTITY, PASS = "identity", "pass"  # files in a newcomer's folder
POLL_S = 2.0
RENEW_INTERVAL_S = 60.0
MakeIssuer = Callable[[Gate], PassIssuer]


class AdmissionService(ServicerBase):
    """What a listening peer answers about admission. Anybody may call it, so it trusts nothing in a request."""

    def __init__(self, p2p: P2P, gate: Gate, issuer: PassIssuer | None):
        self.p2p, self.gate, self.issuer = p2p, gate, issuer

    async def rpc_apply(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        """A pass for the Application in `metadata`, or the reason for refusing it."""
        try:
            if self.issuer is None:
                raise Refused("host only")
            hosts = await hosts_of(self.p2p, context.remote_id)
            statement = self.issuer.admit(Application.parse(request.metadata), min(hosts, default=""))
            answer = {"pass": encoded(statement)}
        except Refused as refusal:
            answer = {"refused": refusal.reason}
        return runtime_pb2.ExpertResponse(metadata=json.dumps(answer).encode())

    async def rpc_bans(self, request: runtime_pb2.ExpertRequest, _: P2PContext) -> runtime_pb2.ExpertResponse:
        """The signed ban list if it is newer than version `metadata`, else nothing."""
        newer = self.gate.current_bans().version > int(json.loads(request.metadata))
        return runtime_pb2.ExpertResponse(metadata=self.gate.bans_statement if newer else b"")

    async def rpc_counts(self, _request: runtime_pb2.ExpertRequest, _: P2PContext) -> runtime_pb2.ExpertResponse:
        """The number of valid passes that this peer has seen, of bans, and of calls that it refused."""
        passes = sum(shown.ends > time.time() for shown in self.gate.admitted.values())
        counts = {"passes": passes, "bans": len(self.gate.current_bans().banned), "refused_calls": self.gate.refused}
        return runtime_pb2.ExpertResponse(metadata=json.dumps(counts).encode())


def begin_admission(
    dht: hivemind.DHT,
    addresses: Sequence[str],
    *,
    run_key_file: Path | None = None,
    make_issuer: MakeIssuer | None = None,
) -> None:
    """Have a guarded node renew its pass before it expires, fetch newer ban lists and serve them to others.

    Args:
        addresses: of the helpers that renew passes.
        run_key_file: of the run's key, which only the host has.
        make_issuer: for a helper; called in the node's process.
    """
    dht.run_coroutine(partial(start, addresses=addresses, run_key_file=run_key_file, make_issuer=make_issuer))


async def start(
    dht: Any, node: DHTNode, addresses: Sequence[str], run_key_file: Path | None, make_issuer: MakeIssuer | None
) -> None:
    """Runs in the node's process."""
    if not node.protocol.client_mode:
        issuer = None if make_issuer is None else make_issuer(dht.gate)
        await AdmissionService(node.p2p, dht.gate, issuer).add_p2p_handlers(node.p2p)
    run_until_shutdown(node, maintain_admission(dht.gate, node, addresses, run_key_file))


async def maintain_admission(gate: Gate, node: DHTNode, addresses: Sequence[str], run_key_file: Path | None) -> None:
    """Until the node ends: every POLL_S ask a random peer for newer bans, and renew the pass when due."""
    renew_s = 0.0
    while True:
        await asyncio.sleep(POLL_S)
        try:
            await learn_bans(gate, node, addresses)
            own = gate.own_pass()
            is_due = own is None or own.ends - time.time() < VALIDITY_S[own.role] / 2
            if is_due and time.monotonic() > renew_s:
                renew_s = time.monotonic() + RENEW_INTERVAL_S
                await renew(gate, node, addresses, run_key_file)
        except Exception:  # an untrusted answer may raise anything
            logging.getLogger("hivemind").exception("updating passes and bans failed")


async def learn_bans(gate: Gate, node: DHTNode, addresses: Sequence[str]) -> None:
    """Ask a random known peer for a newer list: by such gossip it reaches all peers within seconds."""
    known = {*node.protocol.routing_table.uid_to_peer_id.values(), *map(peer_of, addresses)} - {node.peer_id}
    if known:
        version = json.dumps(gate.current_bans().version).encode()
        newer = await answer_of(node, random.choice(list(known)), "rpc_bans", version)
        if newer:
            gate.learn_bans(newer)


async def renew(gate: Gate, node: DHTNode, addresses: Sequence[str], run_key_file: Path | None) -> None:
    """Replace this peer's pass with one that ends later, if a helper issues one."""
    own = gate.own_pass()
    if own is not None and run_key_file is not None:
        issue_own(gate, SigningKey.load(run_key_file), own.peer, own.role)
        return
    asked = Application(peer=str(node.peer_id), current=encoded(gate.own_statement))
    for peer in map(peer_of, addresses):
        answer = json.loads(await answer_of(node, peer, "rpc_apply", asked.to_json()) or b"{}")
        if "pass" in answer:
            keep_pass(gate, asked.peer, decoded(answer["pass"]))
            return


async def answer_of(node: DHTNode, peer: PeerID, method: str, content: bytes) -> bytes:
    """The answer of a peer's AdmissionService; empty if it is offline, has none or is busy: another one is asked."""
    answer = await ask(None, node, service=AdmissionService, peer=peer, method=method, content=content)
    return answer if isinstance(answer, bytes) else b""


def issue_own(gate: Gate, run_key: SigningKey, peer: str, role: str) -> None:
    """Issue a pass to one of the host's own peers."""
    given = Pass(peer=peer, role=role, name="", ends=int(time.time() + VALIDITY_S[HELPER]))
    keep_pass(gate, peer, given.signed(run_key))


def keep_pass(gate: Gate, peer: str, statement: bytes) -> None:
    """Write this peer's pass to its file; Forged if it is another peer's or not of this run."""
    if Pass.read(statement, gate.run_key).peer != peer:
        raise Forged("a pass of another peer")
    write_bytes(gate.own.path, statement)


def apply(dht: hivemind.DHT, addresses: Sequence[str], gate: Gate, asked: Application) -> None:
    """Ask helpers for a pass and save it. If none answers, a pass that is still valid is enough.

    Raises Refused, with the first reason other than "host only", if none admits this peer; Unanswered if none answers.
    """
    content = replace(asked, current=encoded(gate.own_statement)).to_json()
    refusal: Refused | None = None
    for address in addresses:
        try:
            answer = call(dht, address, "rpc_apply", metadata=content, service=AdmissionService)
            if isinstance(answer, dict) and "pass" in answer:
                keep_pass(gate, asked.peer, decoded(answer["pass"]))
                return
        except (Unanswered, Forged):
            continue
        if isinstance(answer, dict) and (refusal is None or refusal.reason == "host only"):
            refusal = Refused(str(answer.get("refused")), asked.peer)
    # A helper elsewhere answers "host only" while the host, which could renew the pass, is offline.
    if refusal is not None and not (gate.has_pass and refusal.reason == "host only"):
        raise refusal
    if not gate.has_pass:
        raise Unanswered(f"no helper at {', '.join(addresses)} issues passes for this run; is the host up?")


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
    """A gate with a pass for the identity in `folder`, issued by a helper at `addresses`.

    Args:
        dht: any node that reaches them; its own identity does not matter.
        name: display name.
        code: of the host's invitation; not needed while the folder has a valid pass.
        run_key_file: of the run's key; a machine that has it issues its own pass.

    Raises Refused, and Unanswered if no helper answers; see `apply`.
    """
    make_identity(folder / IDENTITY)
    gate = Gate(settings.swarm.run_key, folder / PASS, folder / BANS)
    peer = peer_id_in(folder / IDENTITY)
    if run_key_file is not None:
        issue_own(gate, SigningKey.load(run_key_file), peer, TRAINER)
    else:
        apply(dht, addresses, gate, Application(peer=peer, name=name, code=code))
    return gate


def counts_of(dht: hivemind.DHT, addresses: Sequence[str]) -> dict[str, int]:
    """The helpers' counts: the largest numbers of passes and bans, and the sum of the refused calls."""
    found = call_each(dht, dict.fromkeys(addresses, ""), "rpc_counts", service=AdmissionService)
    valid = [counts for counts in found.values() if isinstance(counts, dict)]

    def counted(name: str) -> list[int]:
        return [count for counts in valid if is_whole(count := counts.get(name), 2**53)]

    return {
        "passes": max(counted("passes"), default=0),
        "bans": max(counted("bans"), default=0),
        "refused_calls": sum(counted("refused_calls")),
    }
