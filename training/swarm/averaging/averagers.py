"""What the averagers of gradients and of weights share: robust aggregation in hivemind's averager, matchmaking led by
the host's peers, and finite tensors only.

All peers of a run need averagers with the same class names, from which hivemind derives the names of its RPCs.
"""

import math
import multiprocessing as mp
from collections.abc import Sequence
from functools import partial
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind reads no other)

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.asyncio import as_aiter, azip
from torch import Tensor

from training.swarm.admission.gate import gate_of
from training.swarm.averaging.attestation import Attestation
from training.swarm.averaging.complaints import Complaints
from training.swarm.averaging.finite_mean import FiniteMean
from training.swarm.averaging.group_reports import with_host_reducing, with_readable_reports
from training.swarm.averaging.matchmaking import HostFirstKeys, HostFirstLeaders, UnreliablePeers
from training.swarm.averaging.receipts import SignedGroups, Signer
from training.swarm.averaging.rule_runner import RuleRunner
from training.swarm.host_peers import HostPeers
from training.swarm.observe.peer_metrics import owner_key


class FilteredAverager(DecentralizedAverager):
    """Averages by an aggregation rule and drops averages that are not finite.

    Args:
        rule: see training.swarm.averaging.robust_rules.
        max_weight: cap on one sender's weight.
        host: the run's own peers; while any of them is in the group, nobody else leads or reduces.
        attestation: records each sender's weight after each round.
    """

    max_shift = math.inf
    """Largest distance of an average from what this peer sent, relative to the norm of that."""

    def __init__(
        self,
        *arguments: Any,
        rule: type[FiniteMean] = FiniteMean,
        max_weight: float = math.inf,
        host: HostPeers = HostPeers(),
        attestation: Attestation | None = None,
        **options: Any,
    ):
        self.rule, self.max_weight, self.host, self.attestation = rule, max_weight, host, attestation
        self.unreliable = UnreliablePeers()
        self.averaged_weights: dict[str, float] = {}
        """By peer id, of the latest round; in the averager's process."""
        self._dropped_tensors = mp.Value("q", 0)  # shared with the averager's process
        super().__init__(*arguments, **options)

    @property
    def _matchmaking(self) -> Matchmaking:
        return self._host_first_matchmaking

    @_matchmaking.setter
    def _matchmaking(self, matchmaking: Matchmaking) -> None:
        # hivemind creates it in the averager's process and accepts no key manager.
        keys = matchmaking.group_key_manager
        matchmaking.group_key_manager = HostFirstKeys(
            keys.dht,
            keys.prefix,
            keys.group_bits,
            keys.target_group_size,
            host=self.host.all,
            unreliable=self.unreliable,
        )
        gate = gate_of(keys.dht)
        folder = None if gate is None else gate.bans_file.path.parent
        self.signed_groups = SignedGroups(None if folder is None else folder / f"signed-{keys.prefix}.json")
        self.complaints = Complaints(keys.dht, f"{keys.prefix}.complaints", self.unreliable)
        matchmaking.potential_leaders = HostFirstLeaders(
            matchmaking.peer_id, matchmaking.min_matchmaking_time, matchmaking.target_group_size
        )
        self._host_first_matchmaking = matchmaking

    @property
    def dropped_tensors(self) -> int:
        """Averages dropped because they were not finite, or could not be averages of what was sent."""
        return int(self._dropped_tensors.value)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """As in hivemind, but refuses peers in backoff."""
        if self.unreliable.is_avoided(context.remote_id):
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.NOT_LOOKING_FOR_GROUP)
            return
        async for message in super().rpc_join_group(request, context):
            yield message

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **options: Any) -> Any:
        group_info = with_host_reducing(with_readable_reports(group_info), self.host)
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **options)
        if self.attestation is not None and self.averaged_weights:
            self.attestation.add(self.averaged_weights)
        return gathered

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[Tensor], group_info: GroupInfo, group_id: bytes | None = None, **options: Any
    ) -> None:
        # A helper sends and receives like the others, with weight 0: hivemind passes no modes to an all-reduce.
        group_id = group_info.group_id if group_id is None else group_id
        runner = RuleRunner(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_id,
            ordered_peer_ids=group_info.peer_ids,
            rule=self.rule,
            max_weight=self.max_weight,
            excluded=self.excluded_from(group_info),
            preferred=self.preferred,
            trusted=self.host.all,
            max_shift=self.max_shift,
            new_signer=partial(self.new_signer, group_id),
            **options,
        )
        self._running_groups[group_id].set_result(runner)
        async for tensor, update in azip(as_aiter(*tensors), runner):
            if torch.isfinite(update).all():
                tensor.add_(update, alpha=self._averaging_alpha)
            else:
                self._dropped_tensors.value += 1
            self.last_updated = get_dht_time()
            self._state_updated.set()
        self._dropped_tensors.value += len(runner.impossible) + runner.kept_parts
        failed = runner.banned_senders | runner.impossible
        self.unreliable.update(set(runner.active_senders) - failed, failed)
        self.complaints.round_over(group_id, len(group_info.peer_ids), runner.complete_receipts)
        self.averaged_weights = runner.averaged_weights()

    def new_signer(self, group_id: bytes, timeout_s: float) -> Signer:
        """The signer of this peer's answers as a reducer of a group."""
        self.signed_groups.add(group_id)
        return Signer(self.dht.private_key, owner_key(self.dht), group_id, timeout_s)

    @property
    def preferred(self) -> frozenset[PeerID]:
        """Peers that, if they are in the group and not excluded, are the only ones with weight."""
        return frozenset()

    def excluded_from(self, group_info: GroupInfo) -> set[PeerID]:
        """Members of a group that receive the average but have no weight."""
        return set()


def has_succeeded(control: StepControl) -> bool:
    """Whether a round ended with an average."""
    return control.done() and not control.cancelled() and control.exception() is None
