"""What the averagers of gradients and of weights share: our rule in hivemind's averager, and finite tensors only.

All peers of a run need averagers with the same class names: hivemind derives the names of its remote calls from them.
"""

import asyncio
import dataclasses
import math
import multiprocessing as mp
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time
from hivemind.utils.asyncio import as_aiter, azip
from torch import Tensor

from training.swarm.averaging.attestation import Attestation
from training.swarm.averaging.finite_mean import FiniteMean
from training.swarm.averaging.wire_checks import CheckedStub, checked_parts

LOOKUP_INTERVAL_S = 0.2
MAX_REPORT_BYTES = 1024
MAX_BANDWIDTH = 1e12
NO_REPORT = MSGPackSerializer.dumps((0.0, AveragingMode.CLIENT.value, MSGPackSerializer.dumps(-1)))
"""Reduces nothing and is at no step."""


class RuleRunner(AllReduceRunner):
    """hivemind's all-reduce with our rule for the parts that this peer reduces."""

    tensor_part_reducer: FiniteMean

    def __init__(
        self,
        *,
        rule: type[FiniteMean],
        max_weight: float = math.inf,
        excluded: Collection[PeerID] = (),
        **arguments: object,
    ):
        super().__init__(**arguments)
        self.tensor_part_reducer.finished.set()  # or it warns when it is deleted
        self.tensor_part_reducer = rule(
            tuple(part.shape for part in self.parts_for_local_averaging),
            len(self.sender_peer_ids),
            max_weight=max_weight,
            excluded=[index for index, peer in enumerate(self.sender_peer_ids) if peer in excluded],
        )

    def averaged_weights(self) -> dict[str, float]:
        """By peer id, what each sender's parts counted for that this peer reduced."""
        parts, reducer = len(self.parts_for_local_averaging), self.tensor_part_reducer
        counted = zip(self.sender_peer_ids, reducer.counted_weights, strict=True)
        # A sender that sends parts twice counts for no more than the largest weight, either.
        return {peer.to_base58(): min(weight / parts, reducer.max_weight) for peer, weight in counted if weight}

    def _get_peer_stub(self, peer: PeerID) -> Any:
        return CheckedStub(super()._get_peer_stub(peer))

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for answer in super().rpc_aggregate_part(
            checked_parts(stream, self.tensor_part_reducer.part_shapes), context
        ):
            yield answer


class ThrottledKeyManager(GroupKeyManager):
    """Asks the DHT who is looking for a group at most once per LOOKUP_INTERVAL_S.

    hivemind asks again as soon as it is answered, which costs each peer a whole core on a fast network.
    """

    last_lookup_s = -math.inf

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        await asyncio.sleep(max(0.0, self.last_lookup_s + LOOKUP_INTERVAL_S - time.monotonic()))
        self.last_lookup_s = time.monotonic()
        found: list[tuple[PeerID, float]] = await super().get_averagers(group_key, only_active)
        return found


class FilteredAverager(DecentralizedAverager):
    """Averages by a rule and drops averages that are not finite.

    Args:
        rule: see training.swarm.averaging.aggregation.
        max_weight: cap on one sender's weight.
        attestation: told after each round what each sender counted for.
    """

    def __init__(
        self,
        *arguments: Any,
        rule: type[FiniteMean] = FiniteMean,
        max_weight: float = math.inf,
        attestation: Attestation | None = None,
        **options: Any,
    ):
        self.rule, self.max_weight, self.attestation = rule, max_weight, attestation
        self.averaged_weights: dict[str, float] = {}
        """Of the latest round, in the process that averages."""
        self._dropped_tensors = mp.Value("q", 0)  # shared with the process that averages
        super().__init__(*arguments, **options)

    @property
    def _matchmaking(self) -> Matchmaking:
        return self._throttled_matchmaking

    @_matchmaking.setter
    def _matchmaking(self, matchmaking: Matchmaking) -> None:
        # hivemind builds it in the process that averages and takes no key manager.
        keys = matchmaking.group_key_manager
        throttled = ThrottledKeyManager(keys.dht, keys.prefix, keys.group_bits, keys.target_group_size)
        matchmaking.group_key_manager = throttled
        self._throttled_matchmaking = matchmaking

    @property
    def dropped_tensors(self) -> int:
        """Averages dropped because they were not finite."""
        return int(self._dropped_tensors.value)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **options: Any) -> Any:
        gathered = await super()._aggregate_with_group(with_readable_reports(group_info), min_vector_size, **options)
        if self.attestation is not None and self.averaged_weights:
            self.attestation.add(self.averaged_weights)
        return gathered

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[Tensor], group_info: GroupInfo, group_id: bytes | None = None, **options: Any
    ) -> None:
        group_id = group_info.group_id if group_id is None else group_id
        runner = RuleRunner(
            rule=self.rule,
            max_weight=self.max_weight,
            excluded=self.excluded_from(group_info),
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=group_id,
            ordered_peer_ids=group_info.peer_ids,
            **options,
        )
        self._running_groups[group_id].set_result(runner)
        if runner.modes[group_info.peer_ids.index(self.peer_id)] == AveragingMode.AUX:
            async for _ in runner:
                raise ValueError("auxiliary peers receive no averaged tensors")
            return
        async for tensor, update in azip(as_aiter(*tensors), runner):
            if torch.isfinite(update).all():
                tensor.add_(update, alpha=self._averaging_alpha)
            else:
                self._dropped_tensors.value += 1
            self.last_updated = get_dht_time()
            self._state_updated.set()
        self.averaged_weights = runner.averaged_weights()

    def excluded_from(self, group_info: GroupInfo) -> set[PeerID]:
        """Members of a group that receive the average and count for nothing."""
        return set()


def with_readable_reports(group_info: GroupInfo) -> GroupInfo:
    """The group with NO_REPORT for members whose report makes no sense: hivemind would give up the whole round."""
    gathered = tuple(content if is_report(content) else NO_REPORT for content in group_info.gathered)
    return dataclasses.replace(group_info, gathered=gathered)


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
