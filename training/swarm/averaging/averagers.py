"""hivemind's averagers of gradients and of the state, with our rule, and gates for what comes in.

All peers of a run must have averagers of the same class names: hivemind's remote calls are named after them.
"""

import asyncio
import hashlib
import math
import multiprocessing as mp
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from statistics import median_high, median_low
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.compression import CompressionInfo, deserialize_torch_tensor
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, MSGPackSerializer, get_dht_time
from hivemind.utils.asyncio import aiter_with_timeout, as_aiter, azip
from hivemind.utils.streaming import combine_from_streaming
from hivemind.utils.timed_storage import ValueWithExpiration
from torch import Tensor

from training.swarm.averaging.aggregation import FiniteMean, RuleRunner
from training.swarm.averaging.matchmaking import with_patience

SLACK_BYTES = 2**20
"""A state may be so much larger than expected: metadata, and what the wire adds."""
OUTDATED = -1
"""The step that those name whose weights are not of the present one."""
OUTDATED_WEIGHT = 1e-6
"""What weights count for that became stale after a step was named for them: nothing beside others, and yet where
all are stale there is a mean."""
WEIGHTS_POLL_S = 0.05
MOST_DONORS = 8
"""So many are asked in an attempt: anybody can say that he has a state."""
ANSWER_S = 30.0
"""So much longer than a download may take its process is waited for."""


class GatedAverager(DecentralizedAverager):
    """Averages by a rule, and takes no tensor from others that is not finite.

    Args:
        rule: see training.swarm.averaging.aggregation.
        largest_weight: what one sender counts for at most.
    """

    def __init__(
        self,
        *arguments: Any,
        rule: type[FiniteMean] = FiniteMean,
        largest_weight: float = math.inf,
        **options: Any,
    ):
        self.rule, self.largest_weight = rule, largest_weight
        self._dropped_tensors = mp.Value("q", 0)  # shared with the process that averages
        super().__init__(*arguments, **options)

    @property
    def _matchmaking(self) -> Matchmaking:
        return self._patient_matchmaking

    @_matchmaking.setter
    def _matchmaking(self, matchmaking: Matchmaking) -> None:
        # hivemind makes it where it averages, out of nothing that could be passed in.
        self._patient_matchmaking = with_patience(matchmaking)

    @property
    def dropped_tensors(self) -> int:
        """Averages that were not finite and so were not taken."""
        return int(self._dropped_tensors.value)

    async def _run_allreduce_inplace_(
        self, tensors: Sequence[Tensor], group_info: GroupInfo, group_id: bytes | None = None, **options: Any
    ) -> None:
        group_id = group_info.group_id if group_id is None else group_id
        runner = RuleRunner(
            rule=self.rule,
            largest_weight=self.largest_weight,
            left_out=self.left_out(group_info),
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

    def left_out(self, group_info: GroupInfo) -> set[PeerID]:
        """Members of a group that get the average and count for nothing."""
        return set()


class SaysEpoch(GradientAverager):
    """Tells the members of its groups the step that it has gone: see `epoch_of_group`."""

    epoch_now: Callable[[], int | None]
    """None for peers whose step counts for nothing; set once it is known."""

    def schedule_step(self, scheduled_time: float | None = None, **options: Any) -> StepControl:
        """As hivemind's."""
        return super().schedule_step(scheduled_time, gather=self.epoch_now(), **options)


class SampleWeights(SaysEpoch):
    """Gradients of batches of any size become the mean over their samples. Batches of 0 samples bring nothing."""

    def accumulate_grads_(self, batch_size: int) -> None:
        if batch_size:
            super().accumulate_grads_(batch_size)

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        # hivemind divides by the number of batches, which is the mean only where all have the size of the first.
        samples, unit = self.local_samples_accumulated, self._anchor_batch_size
        with self.get_tensors() as averaged:
            for accumulated, target in zip(self._grad_accumulators(), averaged, strict=True):
                target.copy_(accumulated).mul_(unit / samples if samples else 0.0)


class SwarmGradientAverager(GatedAverager, SampleWeights):
    """Gradients, averaged over all samples of all peers. A peer that only follows the run brings none."""


class SwarmPowerSGDAverager(GatedAverager, SampleWeights, PowerSGDGradientAverager):
    """The same with gradients as products of thin matrices."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        # The same thin matrices for all, as in Vogels et al. 2019, algorithm 1; hivemind draws each peer its own.
        generator = torch.Generator().manual_seed(0)
        for matrix in self._qs:
            matrix.copy_(torch.rand(matrix.shape, generator=generator))

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **options: Any) -> Any:
        # Who brings nothing has nothing left over either; hivemind would note all that the others brought as owed.
        brings_nothing = options.get("weight") == 0
        owed = [matrix.clone() for matrix in self._ms] if brings_nothing else self._ms
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **options)
        if brings_nothing:
            for matrix, before in zip(self._ms, owed, strict=True):
                matrix.copy_(before)
        return gathered


class StateRefused(Exception):
    """A donor's state is not taken; the message says why."""


class SwarmStateAverager(GatedAverager, TrainingStateAverager):
    """Weights, averaged, and the state that newcomers download: weights and optimizer statistics, nothing else.

    Args:
        lr_of_epoch: the learning rate of the step after so many epochs.
        last_epoch: states of later ones are not taken: the schedule has no more.
        donors: peer ids that are asked first.
        judge: given downloaded parameters, in the order of `main_parameters`, raises StateRefused where they are worse
            than none.
        on_download: called with bytes received, bytes in all and the donor while a state comes in.
    """

    local_epoch: int
    weights_epoch: int
    """The step of the weights: `local_epoch`, or the one before it while a delayed step is under way."""
    applied: int
    """How often the model has got weights from here."""
    stale: bool
    """The weights are of an earlier step than `local_epoch` says: until the next average they count for nothing."""
    lacking: int
    """So many steps of `weights_epoch` are not in the weights."""

    def __init__(
        self,
        *,
        lr_of_epoch: Callable[[int], float],
        last_epoch: int,
        donors: Sequence[str] = (),
        judge: Callable[[Sequence[Tensor]], None] | None = None,
        on_download: Callable[[int, int, str], None] | None = None,
        **options: Any,
    ):
        self.lr_of_epoch, self.judge, self.on_download = lr_of_epoch, judge, on_download
        self.donors = {PeerID.from_base58(donor) for donor in donors}
        self.last_epoch = last_epoch
        self._received_bytes = mp.Value("q", 0)
        self.skips_round = False
        """Whether the next round is left out: the gradients of its step were averaged with nobody."""
        self._control: StepControl | None = None
        self._snapshot: tuple[tuple[int, int, int], dict[str, Any], list[Tensor]] | None = None
        self._snapshot_lock = threading.Lock()
        self.weights_epoch = 0
        self.applied = self.adopted = self.lacking = 0
        self.stale = False
        super().__init__(**options)
        self._update_scheduler()

    def _update_scheduler(self) -> None:
        # hivemind calls it where a step has just been taken, before others may look at the weights.
        self.weights_epoch = self.local_epoch
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_of_epoch(self.local_epoch)
        for state in self.optimizer.state.values():
            if "step" in state and not isinstance(state["step"], Tensor):
                state["step"] = self.local_epoch  # for newcomers too, whose own count began late

    def _apply_optimizer_parameters_(self) -> None:
        super()._apply_optimizer_parameters_()
        self.applied += 1

    def left_out(self, group_info: GroupInfo) -> set[PeerID]:
        """Those whose weights are of another step; they get the average."""
        return out_of_step(group_info)

    def _do(
        self,
        wait_for_trigger: Any,
        optimizer_step: bool,
        zero_grad: bool,
        averaging_round: bool,
        averaging_control: StepControl | None,
        *arguments: Any,
        timeout: float | None = None,
    ) -> None:
        if averaging_control is not None and (averaging_control.triggered or averaging_control.done()):
            averaging_control = None  # it has found nobody; hivemind would make one that knows nothing of `stale`
        skipped = averaging_round and self.skips_round
        self.skips_round = False
        if skipped:
            # Who looked for the others in vain would now look for this round while they look for the next gradients.
            if averaging_control is not None:
                averaging_control.cancel()
            averaging_round, averaging_control = False, None
        if averaging_round and averaging_control is None:
            averaging_control = self.schedule_step(gather=self.local_epoch, timeout=timeout)
        self._control = averaging_control
        if self.stale and averaging_control is not None and not averaging_control.began_allreduce:
            averaging_control.weight = OUTDATED_WEIGHT
        super()._do(
            wait_for_trigger,
            optimizer_step,
            zero_grad,
            averaging_round,
            averaging_control,
            *arguments,
            timeout=timeout,
        )
        if skipped:
            self.finished_averaging_round.set()
        if averaging_control is not None and has_succeeded(averaging_control):
            self.stale, self.lacking = False, 0

    def skip_to(self, epoch: int) -> None:
        """Count as if the steps up to `epoch` had been taken; the next average of the weights is that of the others."""
        self.lacking += epoch - self.local_epoch
        self.local_epoch, self.stale = epoch, True

    def schedule_step(self, scheduled_time: float | None = None, **options: Any) -> StepControl:
        """As hivemind's; the others are told whether these weights count."""
        if self.stale:
            options["gather"] = OUTDATED
        return super().schedule_step(scheduled_time, **options)

    def abandon(self) -> None:
        """Look for no group any more; an all-reduce under way is left to its end."""
        control = self._control
        if control is not None and not control.done() and control.stage != AveragingStage.RUNNING_ALLREDUCE:
            control.cancel()

    def state_tensors(self) -> list[Tensor]:
        """Parameters, then the optimizer's statistics, in an order that is the same for all peers."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [*(parameter.detach() for parameter in parameters), *self.statistics(parameters)]

    def statistics(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        """The tensors of the optimizer's state."""
        for parameter in parameters:
            state = self.optimizer.state.get(parameter, {})
            yield from (state[name] for name in sorted(state) if isinstance(state[name], Tensor))

    @property
    def state_bytes(self) -> int:
        """Of a state on the wire."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state_tensors())

    @torch.no_grad()
    def get_current_state(self) -> tuple[dict[str, Any], list[Tensor], list[CompressionInfo]]:
        """For a newcomer: (metadata with the epoch and the SHA-256 of the tensors, tensors, what they are).

        One copy for each epoch: the weights may move while they are sent. The epoch is the weights' own, not that of
        steps which were counted without them.
        """
        with self._snapshot_lock:
            self.await_weights()
            if self._snapshot is None or self._snapshot[0] != self.version:
                self._snapshot = None  # its memory is wanted for the next one
                with self.lock_optimizer, self.lock_averaged_tensors:
                    tensors = [tensor.cpu().clone() for tensor in self.state_tensors()]
                    version = self.version
                epoch, lacking, _ = version
                metadata = {"epoch": max(0, epoch - lacking), "sha256": tensors_sha256(tensors)}
                self._snapshot = version, metadata, tensors
            _, metadata, tensors = self._snapshot
        return metadata, tensors, [CompressionInfo.from_tensor(tensor, key=i) for i, tensor in enumerate(tensors)]

    @property
    def version(self) -> tuple[int, int, int]:
        """Another one for other weights."""
        return self.weights_epoch, self.lacking, self.adopted

    def await_weights(self) -> None:
        """Wait until a step that is counted already has been taken and averaged, as long as an all-reduce may take."""
        deadline = time.monotonic() + (self._allreduce_timeout or math.inf)
        while self.weights_epoch != self.local_epoch and time.monotonic() < deadline:
            time.sleep(WEIGHTS_POLL_S)
        wait(list(self.pending_updates), max(0.0, deadline - time.monotonic()))

    def announced_donors(self) -> dict[PeerID, float]:
        """Others of whom it is said that they hand out a state, and of which epoch; anybody can say so of anybody."""
        found = self.dht.get(f"{self.prefix}.all_averagers", latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        return {
            PeerID(peer): float(entry.value)
            for peer, entry in entries.items()
            if isinstance(peer, bytes) and isinstance(entry, ValueWithExpiration) and is_finite(entry.value)
            if peer != self.peer_id.to_bytes()
        }

    def known_donors(self) -> list[PeerID]:
        """Who is asked for a state: the run's own donors first, whatever is said of them, then the newest."""
        announced = self.announced_donors()
        donors = list(announced.keys() | self.donors - {self.peer_id})
        random.shuffle(donors)
        donors.sort(key=lambda donor: (donor in self.donors, announced.get(donor, -1.0)), reverse=True)
        return donors[:MOST_DONORS]

    def load_state_from_peers(
        self, timeout: float | None = None, least_epoch: int | None = None, *, strangers: bool = True, **_: Any
    ) -> None:
        """Take the state of the first donor that has a good one.

        Args:
            timeout: in seconds, for each of the run's donors, and for all others together: they may be made up.
            least_epoch: earlier states are not taken, nor downloaded; without it any that is not behind the own.
            strangers: whether others than the run's donors are asked.

        Raises StateRefused where none has; it says what was wrong with each.
        """
        least_epoch = self.local_epoch if least_epoch is None else least_epoch
        refusals, left_s = [], math.inf if timeout is None else timeout
        for donor in self.known_donors():
            named, began_s = donor in self.donors, time.monotonic()
            if not named and not (strangers and left_s > 0):
                continue
            try:
                self.adopt(*self.download(donor, timeout if named else left_s, least_epoch))
                return
            except StateRefused as refusal:
                refusals.append(f"{donor.to_base58()[-8:]}: {refusal}")
            left_s -= 0.0 if named else time.monotonic() - began_s
        raise StateRefused("; ".join(refusals) or "nobody hands out a state")

    def download(
        self, donor: PeerID, timeout: float | None, least_epoch: int = 0
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """A donor's metadata and tensors, as they were sent."""
        total, future = self.state_bytes, MPFuture()
        self._received_bytes.value = 0
        request = {
            "donor": donor,
            "limit_bytes": total + total // 100 + SLACK_BYTES,
            "least_epoch": least_epoch,
            "timeout": timeout,
            "future": future,
        }
        self._outer_pipe.send(("_download_state", [], request))
        deadline = time.monotonic() + (math.inf if timeout is None else timeout + ANSWER_S)
        while True:
            if time.monotonic() > deadline or not self.is_alive():
                raise StateRefused("the process that downloads does not answer")
            try:
                outcome = future.result(timeout=0.5)
                break
            except TimeoutError:
                if self.on_download is not None:
                    self.on_download(min(self._received_bytes.value, total), total, donor.to_base58())
        if isinstance(outcome, str):
            raise StateRefused(outcome)
        if self.on_download is not None:
            self.on_download(total, total, donor.to_base58())
        metadata, tensors = outcome
        return metadata, tensors

    async def _download_state(
        self, donor: PeerID, limit_bytes: int, least_epoch: int, timeout: float | None, future: MPFuture
    ) -> None:
        """Runs in the averager's process; the future gets (metadata, tensors), or what went wrong."""
        try:
            future.set_result(await asyncio.wait_for(self._receive_state(donor, limit_bytes, least_epoch), timeout))
        except TimeoutError:
            future.set_result(f"took longer than {timeout:.0f} s")
        except StateRefused as refusal:
            future.set_result(str(refusal))
        except Exception as error:  # whatever a peer may do wrong, the next one is asked
            future.set_result(f"{type(error).__name__}: {error}".splitlines()[0][:200])

    async def _receive_state(
        self, donor: PeerID, limit_bytes: int, least_epoch: int
    ) -> tuple[dict[str, Any], list[Tensor]]:
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        metadata: Any = None
        parts: list[Any] = []
        tensors: list[Tensor] = []
        # A donor in the middle of an all-reduce sends nothing before its end.
        async for message in aiter_with_timeout(stream, timeout=self._allreduce_timeout):
            if message.metadata and metadata is None:
                metadata = self.serializer.loads(message.metadata)
                check_epoch(metadata, least_epoch, self.last_epoch)
            if message.tensor_part.dtype and parts:  # the first part of the next tensor
                tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
                parts = []
            parts.append(message.tensor_part)
            self._received_bytes.value += message.ByteSize()
            if self._received_bytes.value > limit_bytes:
                raise ValueError(f"sent more than the {limit_bytes} bytes that a state has")
        if parts:
            tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
        if metadata is None:
            raise ValueError("has no state to hand out")
        return metadata, tensors

    @torch.no_grad()
    def adopt(self, metadata: Any, tensors: Sequence[Tensor]) -> None:
        """Go on from a donor's state; StateRefused, and nothing changed, unless it is whole, finite and good."""
        own = self.state_tensors()
        check_epoch(metadata, self.local_epoch, self.last_epoch)
        check_state(metadata, tensors, own)
        if self.judge is not None:
            self.judge(tensors[: len(self.main_parameters)])
        with self.lock_optimizer, self.lock_averaged_tensors:
            for tensor, received in zip(own, tensors, strict=True):
                tensor.copy_(received)
            self.adopted += 1
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()
        self.local_epoch, self.stale, self.lacking = metadata["epoch"], False, 0
        self._update_scheduler()


def tensors_sha256(tensors: Sequence[Tensor]) -> str:
    """Of the tensors' bytes, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def out_of_step(group_info: GroupInfo) -> set[PeerID]:
    """The members of a group that are at another step than most, by what they have said."""
    said = zip(group_info.peer_ids, group_info.gathered, strict=True)
    epochs = {peer: epoch for peer, content in said if (epoch := step_said(content)) is not None}
    present = median_high([epoch for epoch in epochs.values() if epoch != OUTDATED] or [OUTDATED])
    return {peer for peer, epoch in epochs.items() if epoch != present}


def step_said(content: bytes) -> int | None:
    """The step that a member of a group has named; None for those that bring no weights, OUTDATED for rubbish."""
    try:
        _bandwidth, mode, said = MSGPackSerializer.loads(content)
        epoch = MSGPackSerializer.loads(said)
    except Exception:  # of whatever kind, it comes from a stranger
        return OUTDATED
    if mode == AveragingMode.AUX.value:
        return None
    return epoch if type(epoch) is int else OUTDATED


def has_succeeded(control: StepControl) -> bool:
    """Whether a round of averaging is over, with an average."""
    return control.done() and not control.cancelled() and control.exception() is None


def epoch_of_group(said: Iterable[Any], own: int) -> int:
    """The last step that members of a group have gone; what is more than one ahead of most of them is not believed."""
    epochs = [epoch for epoch in said if type(epoch) is int and epoch >= 0]
    most = median_low(epochs or [own])  # of two, nobody knows who is right
    return max([own, *(epoch for epoch in epochs if epoch <= most + 1)])


def check_epoch(metadata: Any, least_epoch: int, last_epoch: float = math.inf) -> None:
    """StateRefused for a state without a step, or of an earlier one than `least_epoch` or a later than `last_epoch`."""
    if not (isinstance(metadata, dict) and type(metadata.get("epoch")) is int and metadata["epoch"] >= 0):
        raise StateRefused("does not say its step")
    if metadata["epoch"] < least_epoch:
        raise StateRefused(f"is of step {metadata['epoch']}, behind {least_epoch}")
    if metadata["epoch"] > last_epoch:
        raise StateRefused(f"is of step {metadata['epoch']}, and the schedule ends at {last_epoch}")


def check_state(metadata: Any, tensors: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """StateRefused unless it is a state of this model: as many tensors of the same shapes and types, arrived as they
    were sent, and finite."""
    check_epoch(metadata, 0)
    if [(tensor.shape, tensor.dtype) for tensor in tensors] != [(tensor.shape, tensor.dtype) for tensor in own]:
        raise StateRefused("is the state of another model")
    if metadata.get("sha256") != tensors_sha256(tensors):
        raise StateRefused("did not arrive as it was sent (checksum)")
    if not all(torch.isfinite(tensor).all() for tensor in tensors if tensor.is_floating_point()):
        raise StateRefused("has numbers that are not finite")


def is_finite(value: Any) -> bool:
    """Whether a stranger's value is a number that can be compared."""
    return isinstance(value, float | int) and math.isfinite(value)
