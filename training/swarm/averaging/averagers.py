"""What the averagers of gradients and of weights share: robust aggregation in hivemind's averager, matchmaking led by
the host's peers, and finite tensors only.

All peers of a run need averagers with the same class names, from which hivemind derives the names of its RPCs.
"""

import logging
import math
import multiprocessing as mp
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind reads no other)

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import deserialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import as_aiter, azip
from torch import Tensor

from dalle_lean.io.safetensors_io import is_finite
from training.swarm.averaging.aggregation_rules import REJECT_RADII, PartReducer, Rule
from training.swarm.averaging.attestation import Attestation
from training.swarm.averaging.complaints import Complaints
from training.swarm.averaging.group_reports import with_checked_reports
from training.swarm.averaging.matchmaking import HostFirstKeys, HostFirstLeaders, UnreliablePeers
from training.swarm.averaging.receipts import Receipt, SignedGroups, Signer, check_statement
from training.swarm.averaging.wire import CheckedStub, checked_parts
from training.swarm.host_peers import HostPeers
from training.swarm.network.owner_keys import owner_key

logger = logging.getLogger("hivemind")


class FilteredAverager(DecentralizedAverager):
    """Averages by an aggregation rule and drops averages that are not finite.

    Args:
        rule: see training.swarm.averaging.aggregation_rules.
        max_weight: cap on one sender's weight.
        host: the run's own peers; while any of them is in the group, nobody else leads or reduces.
        attestation: records each sender's weight after each round.
    """

    max_shift = math.inf
    """Largest distance of an average from what this peer sent, relative to the norm of that."""
    least_own_weight = 1e-3
    """A peer that sent with less, such as one without samples, cannot judge an average by its own tensors."""

    def __init__(
        self,
        *arguments: Any,
        rule: Rule = PartReducer,
        max_weight: float = math.inf,
        host: HostPeers = HostPeers(),
        attestation: Attestation | None = None,
        **options: Any,
    ):
        self.rule, self.max_weight, self.host, self.attestation = rule, max_weight, host, attestation
        self.unreliable = UnreliablePeers()
        self.averaged_weights: dict[str, float] = {}  # by peer id, of the latest round; in the averager's process
        self.counts_round = False  # whether this peer counts the samples of that round for all helpers
        self._dropped_tensors = mp.Value("q", 0)  # shared with the averager's process
        super().__init__(*arguments, **options)

    @property
    def _matchmaking(self) -> Matchmaking:
        return self._host_first_matchmaking

    @_matchmaking.setter
    def _matchmaking(self, matchmaking: Matchmaking) -> None:
        # hivemind creates it in the averager's process and accepts no key manager.
        keys = matchmaking.group_key_manager
        gate = keys.dht.gate
        of_keys = keys.dht, keys.prefix, keys.group_bits, keys.target_group_size
        matchmaking.group_key_manager = HostFirstKeys(*of_keys, host=self.host.all, unreliable=self.unreliable)
        self.signed_groups = SignedGroups(gate and gate.bans_file.path.with_name(f"signed-{keys.prefix}.json"))
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
        group_info = with_checked_reports(group_info, self.host)
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **options)
        if self.attestation is not None and self.averaged_weights:
            self.attestation.add(self.averaged_weights, counts=self.counts_round)
        return gathered

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[Tensor], group_info: GroupInfo, group_id: bytes | None = None, **options: Any
    ) -> None:
        # A helper sends and receives like the others, with weight 0: hivemind passes no modes to an all-reduce.
        group_id = group_info.group_id if group_id is None else group_id
        runner = RuleRunner(self, group_info, tensors=tensors, group_id=group_id, **options)
        self._running_groups[group_id].set_result(runner)
        async for tensor, update in azip(as_aiter(*tensors), runner):
            if is_finite(update):
                tensor.add_(update, alpha=self._averaging_alpha)
            else:
                self._dropped_tensors.value += 1
        self._dropped_tensors.value += len(runner.impossible) + runner.kept_parts
        failed = runner.banned_senders | runner.impossible
        self.unreliable.update(set(runner.active_senders) - failed, failed)
        self.complaints.round_over(group_id, group_info.peer_ids, runner.complete_receipts)
        self.averaged_weights, self.counts_round = runner.averaged_weights(), runner.is_first_helper

    @property
    def preferred(self) -> frozenset[PeerID]:
        """Peers that, if they are in the group and not excluded, are the only ones with weight."""
        return frozenset()

    def excluded_from(self, group_info: GroupInfo) -> set[PeerID]:
        """Members of a group that receive the average but have no weight."""
        return set()


class RuleRunner(AllReduceRunner):
    """hivemind's all-reduce in one group of an averager, with its rule for the parts that this peer reduces.

    An answer is accepted only if it can be an average of clipped parts. A reducer that is not one of the host's peers
    and returns anything else is dropped for the round, and this peer keeps its own parts.
    """

    tensor_part_reducer: PartReducer

    def __init__(self, averager: FilteredAverager, group_info: GroupInfo, **options: Any):
        super().__init__(
            p2p=averager._p2p,
            servicer_type=type(averager),
            prefix=averager.prefix,
            ordered_peer_ids=group_info.peer_ids,
            **options,
        )
        excluded, preferred = averager.excluded_from(group_info), averager.preferred
        self.tensor_part_reducer.finished.set()  # prevents a warning upon deletion
        self.tensor_part_reducer = averager.rule(
            tuple(part.shape for part in self.parts_for_local_averaging),
            len(self.sender_peer_ids),
            max_weight=averager.max_weight,
            excluded=[index for index, peer in enumerate(self.sender_peer_ids) if peer in excluded],
            preferred=[index for index, peer in enumerate(self.sender_peer_ids) if peer in preferred],
        )
        self.trusted, self.helpers, self.max_shift = averager.host.all, averager.host.helpers, averager.max_shift
        self.judges = self.weight >= averager.least_own_weight
        self.judges_trusted = self.judges and not preferred.intersection(self.ordered_peer_ids)
        """Of two senders, an honest reducer returns half of a lie; next to a donor nobody else has weight."""
        self.kept_parts = 0  # own parts kept in place of averages that were too far away
        self.impossible: set[PeerID] = set()
        """Reducers whose answers cannot be averages, or differ from what they signed."""
        self.signer: Signer | None = None
        if self.peer_id not in self.trusted and self.parts_for_local_averaging:
            averager.signed_groups.add(self.group_id)
            owner = owner_key(averager.dht)
            self.signer = Signer(averager.dht.private_key, owner, self.group_id, self.sender_timeout)
        self.answers: dict[PeerID, deque[averaging_pb2.AveragingData]] = defaultdict(deque)
        """From reducers that are not trusted, until they are registered."""
        self.receipts: dict[PeerID, Receipt] = {}  # for the latest part of each reducer that is not trusted
        container = self.tensor_part_container
        norm = torch.nn.utils.get_total_norm(container.local_tensors)
        self.root_mean_square = float(norm) / math.sqrt(max(1, container.total_size))
        self.failed: set[PeerID] = set()  # reducers whose parts this peer replaces with its own
        self._register, self._register_failed = container.register_processed_part, container.register_failed_reducer
        container.register_processed_part, container.register_failed_reducer = self.register, self.register_failed

    def register_failed(self, peer_index: int) -> None:
        """Keep this peer's own parts where a reducer has returned none."""
        self.failed.add(self.ordered_peer_ids[peer_index])
        self._register_failed(peer_index)

    def register(self, peer_index: int, part_index: int, delta: Tensor) -> None:
        """Take a reducer's average, as its difference from this peer's part, if it is plausible."""
        peer = self.ordered_peer_ids[peer_index]
        if peer != self.peer_id and peer not in self.trusted and peer not in self.failed:
            try:
                self.check(peer, peer_index, part_index, delta)
            except ValueError as error:
                self.impossible.add(peer)
                logger.warning(f"{peer} returned {error}: ignored in this round")
                raise AllreduceException(f"{peer} returned no valid average") from None
        elif peer not in self.failed and self.judges_trusted and not self.is_near(peer_index, part_index, delta):
            self.kept_parts += 1
            delta = torch.zeros_like(delta)
        self._register(peer_index, part_index, delta)

    def is_near(self, peer_index: int, part_index: int, delta: Tensor) -> bool:
        """Whether an average is within `max_shift` of what this peer sent."""
        if math.isinf(self.max_shift):
            return True
        own, _ = self.tensor_part_container._input_parts_by_peer[peer_index][part_index]
        return float(delta.norm()) <= self.max_shift * size_of(own, self.root_mean_square)

    def check(self, peer: PeerID, peer_index: int, part_index: int, delta: Tensor) -> None:
        """Keep the receipt for a part; ValueError if it has no valid one, or cannot be an average."""
        own, info = self.tensor_part_container._input_parts_by_peer[peer_index][part_index]
        if self.judges and not is_possible(own, delta, self.root_mean_square, self.max_shift):
            raise ValueError("what cannot be an average of the group's tensors")
        answer, before = self.answers[peer].popleft(), self.receipts.get(peer)
        self.receipts[peer] = check_statement(
            answer.peer_id,
            answer.tensor_part.buffer,
            deserialize_torch_tensor(self.tensor_part_container.compression.compress(own, info)),
            delta,
            reducer=peer,
            group=self.group_id,
            part=part_index,
            previous=b"" if before is None else before.digest,
        )

    @property
    def complete_receipts(self) -> dict[PeerID, Receipt]:
        """The receipts of reducers that returned all of their parts; they must be the same for all senders."""
        last = dict(zip(self.ordered_peer_ids, self.tensor_part_container.num_parts_by_peer, strict=True))
        return {peer: receipt for peer, receipt in self.receipts.items() if receipt.part == last[peer] - 1}

    def averaged_weights(self) -> dict[str, float]:
        """The weight, by peer id, of each sender in the parts that this peer reduced."""
        parts, reducer = len(self.parts_for_local_averaging), self.tensor_part_reducer
        counted = zip(self.sender_peer_ids, reducer.counted_weights, strict=True)
        return {peer.to_base58(): weight / parts for peer, weight in counted if weight}

    @property
    def is_first_helper(self) -> bool:
        """Whether this peer is the first of the run's helpers that reduce in this round; the same for all of them."""
        parts = zip(self.ordered_peer_ids, self.tensor_part_container.num_parts_by_peer, strict=True)
        return self.peer_id == min((peer for peer, count in parts if count and peer in self.helpers), default=None)

    def _get_peer_stub(self, peer: PeerID) -> Any:
        stub = super()._get_peer_stub(peer)
        return CheckedStub(stub) if peer in self.trusted else CheckedStub(stub, self.answers[peer].append)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        if context.remote_id in self.active_senders:
            # hivemind would count each stream of a sender as one more sender, and end the part without the others.
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for answer in super().rpc_aggregate_part(
            checked_parts(stream, self.tensor_part_reducer.part_shapes), context
        ):
            yield answer

    async def _accumulate_parts_streaming(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], sender_index: int
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        reducer, part_index = self.tensor_part_reducer, 0
        async for answer in super()._accumulate_parts_streaming(stream, sender_index):
            if self.signer is not None:
                answered = [
                    sender
                    for sender, failed_after in enumerate(reducer.sender_failed_after)
                    if failed_after > part_index and self.sender_peer_ids[sender] != self.peer_id
                ]
                # hivemind's answers leave this field empty.
                answer.peer_id = await self.signer.statement(
                    part_index, sender_index, answer.tensor_part.buffer, reducer.average, answered
                )
                part_index += 1
            yield answer


def is_possible(own: Tensor, delta: Tensor, root_mean_square: float, max_shift: float) -> bool:
    """Whether a part, sent as `own` and returned as `own + delta`, can be an average of clipped parts.

    Clipping rejects parts farther than REJECT_RADII radii from the centre.
    """
    size = size_of(own, root_mean_square)
    returned, shift = float((own + delta).norm()), float(delta.norm())
    return size == 0 or (returned <= REJECT_RADII * size and shift <= max_shift * size)


def size_of(part: Tensor, root_mean_square: float) -> float:
    """A part's norm, at least that of its sender's root mean square: a single part may be nearly zero by chance."""
    return max(float(part.norm()), root_mean_square * math.sqrt(part.numel()))


def stop_matchmaking(control: StepControl | None) -> None:
    """Stop looking for a group for this round; a running all-reduce continues."""
    if control is not None and not control.done() and control.stage != AveragingStage.RUNNING_ALLREDUCE:
        control.cancel()


def has_succeeded(control: StepControl) -> bool:
    """Whether a round ended with an average."""
    return control.done() and not control.cancelled() and control.exception() is None
