"""hivemind's all-reduce with our aggregation rule, and checks of the averages that other reducers return."""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any, AsyncIterator  # noqa: UP035 (hivemind reads no other)

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import deserialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from torch import Tensor

from training.swarm.averaging.finite_mean import FiniteMean
from training.swarm.averaging.receipts import Receipt, Signer, check_statement
from training.swarm.averaging.robust_rules import REJECT_RADII
from training.swarm.averaging.wire_checks import CheckedStub, checked_parts

LEAST_OWN_WEIGHT = 1e-3
"""A peer with less, without samples or with stale weights, cannot judge an average by its own tensors."""

logger = logging.getLogger("hivemind")


class RuleRunner(AllReduceRunner):
    """hivemind's all-reduce with our rule for the parts that this peer reduces.

    An answer is accepted only if it can be an average of clipped parts. A reducer that is not `trusted` and returns
    anything else is dropped for the round, and this peer keeps its own parts.
    """

    tensor_part_reducer: FiniteMean

    def __init__(
        self,
        *,
        rule: type[FiniteMean],
        max_weight: float,
        excluded: Collection[PeerID],
        preferred: Collection[PeerID],
        trusted: Collection[PeerID],
        max_shift: float,
        new_signer: Callable[[float], Signer],
        **options: Any,
    ):
        """Args:
        rule: see training.swarm.averaging.robust_rules.
        max_weight: cap on one sender's weight.
        excluded: members whose parts have no weight.
        preferred: if any of these members is there, nobody else has weight.
        trusted: reducers whose answers are not dropped.
        max_shift: largest distance of an average from what this peer sent, relative to the norm of that.
        new_signer: takes the timeout for a sender in seconds, returns the signer of this peer's answers.
        """
        super().__init__(**options)
        self.tensor_part_reducer.finished.set()  # prevents a warning upon deletion
        self.tensor_part_reducer = rule(
            tuple(part.shape for part in self.parts_for_local_averaging),
            len(self.sender_peer_ids),
            max_weight=max_weight,
            excluded=[index for index, peer in enumerate(self.sender_peer_ids) if peer in excluded],
            preferred=[index for index, peer in enumerate(self.sender_peer_ids) if peer in preferred],
        )
        self.trusted, self.max_shift = trusted, max_shift
        self.judges_trusted = self.weight >= LEAST_OWN_WEIGHT and not set(preferred).intersection(self.ordered_peer_ids)
        """Of two senders, an honest reducer returns half of a lie; next to a donor nobody else has weight."""
        self.kept_parts = 0
        """Own parts kept in place of averages that were too far away."""
        self.impossible: set[PeerID] = set()
        """Reducers whose answers cannot be averages, or differ from what they signed."""
        signs = self.peer_id not in trusted and self.parts_for_local_averaging
        self.signer = new_signer(self.sender_timeout) if signs else None
        self.answers: dict[PeerID, deque[averaging_pb2.AveragingData]] = defaultdict(deque)
        """From reducers that are not trusted, until they are registered."""
        self.receipts: dict[PeerID, Receipt] = {}
        """For the latest part of each reducer that is not trusted."""
        tensors = self.tensor_part_container.local_tensors
        norm, values = torch.stack([tensor.norm() for tensor in tensors]).norm(), sum(map(torch.numel, tensors))
        self.root_mean_square = float(norm) / math.sqrt(max(1, values))
        self.failed: set[PeerID] = set()
        """Reducers whose parts this peer replaces with its own."""
        container = self.tensor_part_container
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
        if self.weight >= LEAST_OWN_WEIGHT and not is_possible(own, delta, self.root_mean_square, self.max_shift):
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
        # Sending parts twice does not exceed the largest weight either.
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
