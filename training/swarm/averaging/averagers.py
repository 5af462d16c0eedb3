"""What the averagers of gradients and of weights share: our rule in hivemind's averager, and finite tensors only.

All peers of a run need averagers with the same class names: hivemind derives the names of its remote calls from them.
"""

import dataclasses
import logging
import math
import multiprocessing as mp
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind reads no other)

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import deserialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.asyncio import as_aiter, azip
from torch import Tensor

from training.swarm.admission.gate import gate_of
from training.swarm.averaging.attestation import Attestation
from training.swarm.averaging.complaints import Complaints
from training.swarm.averaging.finite_mean import FiniteMean
from training.swarm.averaging.matchmaking import Absentees, HostFirstKeys, HostFirstLeaders
from training.swarm.averaging.receipts import Receipt, SignedGroups, Signer, check_statement
from training.swarm.averaging.robust_rules import REJECT_RADII
from training.swarm.averaging.wire_checks import CheckedStub, checked_parts
from training.swarm.host_peers import HostPeers
from training.swarm.observe.peer_metrics import owner_key

LEAST_OWN_WEIGHT = 1e-3
"""Who weighs less, having no samples or stale weights, cannot tell from its own tensors what an average may be."""
MAX_REPORT_BYTES = 1024
MAX_BANDWIDTH = 1e12
NO_REPORT = MSGPackSerializer.dumps((0.0, AveragingMode.CLIENT.value, MSGPackSerializer.dumps(-1)))
"""Reduces nothing and is at no step."""

logger = logging.getLogger("hivemind")


class RuleRunner(AllReduceRunner):
    """hivemind's all-reduce with our rule for the parts that this peer reduces.

    What reducers return is believed only as far as it can be an average of clipped parts: a reducer that is not
    `trusted` and returns anything else is dropped for the round, and this peer keeps its own parts.
    """

    tensor_part_reducer: FiniteMean

    def __init__(
        self,
        averager: "FilteredAverager",
        tensors: Sequence[Tensor],
        group_info: GroupInfo,
        group_id: bytes,
        **options: Any,
    ):
        super().__init__(
            p2p=averager._p2p,
            servicer_type=type(averager),
            prefix=averager.prefix,
            tensors=tensors,
            group_id=group_id,
            ordered_peer_ids=group_info.peer_ids,
            **options,
        )
        excluded, preferred = averager.excluded_from(group_info), averager.preferred
        self.tensor_part_reducer.finished.set()  # or it warns when it is deleted
        self.tensor_part_reducer = averager.rule(
            tuple(part.shape for part in self.parts_for_local_averaging),
            len(self.sender_peer_ids),
            max_weight=averager.max_weight,
            excluded=[index for index, peer in enumerate(self.sender_peer_ids) if peer in excluded],
            preferred=[index for index, peer in enumerate(self.sender_peer_ids) if peer in preferred],
        )
        self.trusted, self.max_shift = averager.host.all, averager.max_shift
        self.judges_trusted = self.weight >= LEAST_OWN_WEIGHT and not averager.preferred.intersection(
            group_info.peer_ids
        )
        """An honest reducer returns half of a lie where there are two senders; beside a donor nobody else counts."""
        self.kept_parts = 0
        """Of this peer's own, in place of averages that are too far from them."""
        self.impossible: set[PeerID] = set()
        """Reducers that returned what can be no average, or not what they signed."""
        self.signer: Signer | None = None
        if self.peer_id not in self.trusted and self.parts_for_local_averaging:
            averager.signed_groups.add(group_id)
            self.signer = Signer(averager.dht.private_key, owner_key(averager.dht), group_id, self.sender_timeout)
        self.answers: dict[PeerID, deque[averaging_pb2.AveragingData]] = defaultdict(deque)
        """Of reducers that are not trusted, until they are registered."""
        self.receipts: dict[PeerID, Receipt] = {}
        """For the latest part that each of them returned."""
        norm, values = torch.stack([tensor.norm() for tensor in tensors]).norm(), sum(map(torch.numel, tensors))
        self.root_mean_square = float(norm) / math.sqrt(max(1, values))
        self.failed: set[PeerID] = set()
        """Reducers in whose place this peer's own parts are registered."""
        container = self.tensor_part_container
        self._register, self._register_failed = container.register_processed_part, container.register_failed_reducer
        container.register_processed_part, container.register_failed_reducer = self.register, self.register_failed

    def register_failed(self, peer_index: int) -> None:
        """Keep this peer's own parts for those that a reducer has not returned."""
        self.failed.add(self.ordered_peer_ids[peer_index])
        self._register_failed(peer_index)

    def register(self, peer_index: int, part_index: int, delta: Tensor) -> None:
        """Take what a reducer returned, as its difference from this peer's part, unless it is impossible."""
        peer = self.ordered_peer_ids[peer_index]
        if peer != self.peer_id and peer not in self.trusted and peer not in self.failed:
            try:
                self.check(peer, peer_index, part_index, delta)
            except ValueError as error:
                self.impossible.add(peer)
                logger.warning(f"{peer} returned {error}: ignored in this round")
                raise AllreduceException(f"{peer} returned no average") from None
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
        """Keep the receipt for a part; ValueError if it has none, or can be no average."""
        own, info = self.tensor_part_container._input_parts_by_peer[peer_index][part_index]
        if self.weight >= LEAST_OWN_WEIGHT and not is_possible(own, delta, self.root_mean_square, self.max_shift):
            raise ValueError("what is no average of the group's tensors")
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
    def whole_receipts(self) -> dict[PeerID, Receipt]:
        """Of those that returned all of their parts: what others have must be the same."""
        last = dict(zip(self.ordered_peer_ids, self.tensor_part_container.num_parts_by_peer, strict=True))
        return {peer: receipt for peer, receipt in self.receipts.items() if receipt.part == last[peer] - 1}

    def averaged_weights(self) -> dict[str, float]:
        """By peer id, what each sender's parts counted for that this peer reduced."""
        parts, reducer = len(self.parts_for_local_averaging), self.tensor_part_reducer
        counted = zip(self.sender_peer_ids, reducer.counted_weights, strict=True)
        # A sender that sends parts twice counts for no more than the largest weight, either.
        return {peer.to_base58(): min(weight / parts, reducer.max_weight) for peer, weight in counted if weight}

    def _get_peer_stub(self, peer: PeerID) -> Any:
        stub = super()._get_peer_stub(peer)
        return CheckedStub(stub) if peer in self.trusted else CheckedStub(stub, self.answers[peer].append)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
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


class FilteredAverager(DecentralizedAverager):
    """Averages by a rule and drops averages that are not finite.

    Args:
        rule: see training.swarm.averaging.robust_rules.
        max_weight: cap on one sender's weight.
        host: the run's own peers; while they are there nobody else leads a group or reduces.
        attestation: told after each round what each sender counted for.
    """

    max_shift = math.inf
    """How far an average may be from what this peer sent, in norms of that."""

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
        self.absentees = Absentees()
        self.averaged_weights: dict[str, float] = {}
        """Of the latest round, in the process that averages."""
        self._dropped_tensors = mp.Value("q", 0)  # shared with the process that averages
        super().__init__(*arguments, **options)

    @property
    def _matchmaking(self) -> Matchmaking:
        return self._host_first_matchmaking

    @_matchmaking.setter
    def _matchmaking(self, matchmaking: Matchmaking) -> None:
        # hivemind builds it in the process that averages and takes no key manager.
        keys = matchmaking.group_key_manager
        matchmaking.group_key_manager = HostFirstKeys(
            keys.dht,
            keys.prefix,
            keys.group_bits,
            keys.target_group_size,
            host=self.host.all,
            absentees=self.absentees,
        )
        gate = gate_of(keys.dht)
        folder = None if gate is None else gate.bans_file.path.parent
        self.signed_groups = SignedGroups(None if folder is None else folder / f"signed-{keys.prefix}.json")
        self.complaints = Complaints(keys.dht, f"{keys.prefix}.complaints", self.absentees)
        matchmaking.potential_leaders = HostFirstLeaders(
            matchmaking.peer_id, matchmaking.min_matchmaking_time, matchmaking.target_group_size
        )
        self._host_first_matchmaking = matchmaking

    @property
    def dropped_tensors(self) -> int:
        """Averages dropped because they were not finite, or no average of what was sent."""
        return int(self._dropped_tensors.value)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """As hivemind's; who let down a group that this peer was in waits."""
        if self.absentees.is_left_out(context.remote_id):
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
        # A helper sends and receives like all others, with weight 0: hivemind passes no modes to an all-reduce.
        group_id = group_info.group_id if group_id is None else group_id
        runner = RuleRunner(self, tensors, group_info, group_id, **options)
        self._running_groups[group_id].set_result(runner)
        async for tensor, update in azip(as_aiter(*tensors), runner):
            if torch.isfinite(update).all():
                tensor.add_(update, alpha=self._averaging_alpha)
            else:
                self._dropped_tensors.value += 1
            self.last_updated = get_dht_time()
            self._state_updated.set()
        self._dropped_tensors.value += len(runner.impossible) + runner.kept_parts
        absent = runner.banned_senders | runner.impossible
        self.absentees.note(set(runner.active_senders) - absent, absent)
        self.complaints.round_over(group_id, len(group_info.peer_ids), runner.whole_receipts)
        self.averaged_weights = runner.averaged_weights()

    @property
    def preferred(self) -> frozenset[PeerID]:
        """Peers beside whom nobody else counts where they are in the group and not excluded."""
        return frozenset()

    def excluded_from(self, group_info: GroupInfo) -> set[PeerID]:
        """Members of a group that receive the average and count for nothing."""
        return set()


def with_readable_reports(group_info: GroupInfo) -> GroupInfo:
    """The group with NO_REPORT for members whose report makes no sense: hivemind would give up the whole round."""
    gathered = tuple(content if is_report(content) else NO_REPORT for content in group_info.gathered)
    return dataclasses.replace(group_info, gathered=gathered)


def with_host_reducing(group_info: GroupInfo, host: HostPeers) -> GroupInfo:
    """The group in which only the host's helpers reduce, or its donors where no helper is; unchanged without either.

    All members must agree on who reduces, and they know the same helpers however many donors a host has added since.
    """
    reports = dict(zip(group_info.peer_ids, map(MSGPackSerializer.loads, group_info.gathered), strict=True))
    clients = {peer for peer, (_, mode, _) in reports.items() if mode == AveragingMode.CLIENT.value}
    able = {peer for peer, (bandwidth, *_) in reports.items() if bandwidth != 0} - clients
    chosen = able & host.helpers or able & host.donors
    if not chosen:
        return group_info
    gathered = tuple(
        content if peer in chosen else MSGPackSerializer.dumps((0.0, *reports[peer][1:]))
        for peer, content in zip(group_info.peer_ids, group_info.gathered, strict=True)
    )
    return dataclasses.replace(group_info, gathered=gathered)


def is_possible(own: Tensor, delta: Tensor, root_mean_square: float, max_shift: float) -> bool:
    """Whether a part, sent as `own` and returned as `own + delta`, may be an average of parts that clipping allows.

    Clipping rejects what is farther from the centre than REJECT_RADII radii.
    """
    size = size_of(own, root_mean_square)
    returned, shift = float((own + delta).norm()), float(delta.norm())
    return size == 0 or (returned <= REJECT_RADII * size and shift <= max_shift * size)


def size_of(part: Tensor, root_mean_square: float) -> float:
    """A part's norm, or that of a part of its sender's root mean square: single parts may be nearly zero by chance."""
    return max(float(part.norm()), root_mean_square * math.sqrt(part.numel()))


def is_report(content: bytes) -> bool:
    """Whether a member of a group tells its bandwidth, its mode and something for the others."""
    if len(content) > MAX_REPORT_BYTES:
        return False
    try:
        bandwidth, mode, gathered = MSGPackSerializer.loads(content)
        AveragingMode(mode)
        MSGPackSerializer.loads(gathered)
    except Exception:  # a stranger's bytes may raise anything
        return False
    return bandwidth is None or (type(bandwidth) in (int, float) and 0 <= bandwidth <= MAX_BANDWIDTH)


def has_succeeded(control: StepControl) -> bool:
    """Whether a round of averaging ended with an average."""
    return control.done() and not control.cancelled() and control.exception() is None
