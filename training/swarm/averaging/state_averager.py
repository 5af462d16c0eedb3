"""Averages the weights over the peers that are at the same step, and transfers the state that newcomers download."""

import asyncio
import math
import multiprocessing as mp
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import deserialize_torch_tensor
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import aiter_with_timeout
from hivemind.utils.streaming import combine_from_streaming
from hivemind.utils.timed_storage import ValueWithExpiration
from torch import Tensor

from training.swarm.averaging.averagers import FilteredAverager, has_succeeded
from training.swarm.averaging.group_reports import STALE_EPOCH, out_of_step
from training.swarm.averaging.state_validation import (
    StateRefused,
    check_epoch,
    check_near,
    check_state,
    copy_all,
    sign_state,
    state_signer,
    tensors_sha256,
)
from training.swarm.averaging.wire import check_tensor

STALE_WEIGHT = 1e-6
"""Weight of a peer that became stale after it reported its step: negligible next to others, yet enough for a mean if
all are stale."""
STATE_SLACK_BYTES = 2**20  # allowance for metadata and framing of a state on the wire
WEIGHTS_POLL_S = 0.05
MESSAGE_BYTES = 256  # memory of a message beside its content, which may be tiny
MAX_DONORS = 8  # asked per attempt, since anybody can announce a state
PROCESS_GRACE_S = 30.0  # how much longer than a download may take to wait for the averager's process


class SwarmStateAverager(FilteredAverager, TrainingStateAverager):
    """Averages the weights, tracks the step that they belong to, serves the state, and downloads it from others.

    The state is the weights and the optimizer's statistics. The optimizer works on copies of the model's parameters,
    which are the averaged tensors too.

    Args:
        lr_of_epoch: maps an epoch to the learning rate of the step that follows it.
        last_epoch: the end of the schedule; states of later steps are refused.
        first_epoch: the step at which the run began; unless it is 0, only donors have that step's weights.
    """

    max_shift = 0.5
    """Weights of one step are close to each other."""
    least_own_weight = STALE_WEIGHT
    """Weights that miss a few steps are close enough to judge; a group of enemies must not replace them."""
    local_epoch: int
    validate: Callable[[Sequence[Tensor]], None] | None = None
    """Takes downloaded parameters in the order of `main_parameters`; raises StateRefused if they are bad."""
    on_download: Callable[[int, int, str], None] = staticmethod(lambda *_: None)
    """Called during a download with the bytes received, the total bytes and the donor."""

    def __init__(self, *, lr_of_epoch: Callable[[int], float], last_epoch: int, first_epoch: int = 0, **options: Any):
        self.lr_of_epoch, self.first_epoch, self.last_epoch = lr_of_epoch, first_epoch, last_epoch
        self.weights_epoch = 0
        """The step of the weights: `local_epoch`, or the one before while a delayed step is running."""
        self.missed_steps = 0  # steps up to `weights_epoch` that the weights do not contain
        self.times_applied = 0  # how often the averager has written weights into the model
        self.stale = False
        """Whether the weights are older than `local_epoch`; they have no weight until the next average."""
        self.skip_next_round = False  # set if the step's gradients were averaged with nobody
        self.latest_round: StepControl | None = None
        self.downloads = 0
        self._received_bytes = mp.Value("q", 0)
        self._snapshot: tuple[tuple[int, int, int], dict[str, Any], list[Tensor]] | None = None
        self._snapshot_lock = threading.Lock()
        super().__init__(offload_optimizer=True, custom_gradients=True, initialize_optimizer=False, **options)
        self._update_scheduler()

    def _update_scheduler(self) -> None:
        # hivemind calls it right after a step, before other threads may read the weights.
        self.weights_epoch = self.local_epoch
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_of_epoch(self.local_epoch)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = self.local_epoch  # a newcomer started to count late

    def _apply_optimizer_parameters_(self) -> None:
        super()._apply_optimizer_parameters_()
        self.times_applied += 1

    @property
    def preferred(self) -> frozenset[PeerID]:
        # A donor takes every step with the averaged gradients, so its weights are at least as good as anybody's.
        return self.host.donors

    def excluded_from(self, group_info: GroupInfo) -> set[PeerID]:
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
            averaging_control = None  # it found nobody; hivemind would create a new one that ignores `stale`
        skipped = averaging_round and self.skip_next_round
        self.skip_next_round = False
        if skipped:
            # A peer that found no group would look for this one while the others already look for the next step's.
            if averaging_control is not None:
                averaging_control.cancel()
            averaging_round, averaging_control = False, None
        if averaging_round and averaging_control is None:
            averaging_control = self.schedule_step(gather=self.local_epoch, timeout=timeout)
        self.latest_round = averaging_control
        if self.stale and averaging_control is not None and not averaging_control.began_allreduce:
            averaging_control.weight = STALE_WEIGHT
        dropped = self.dropped_tensors
        super()._do(
            wait_for_trigger, optimizer_step, zero_grad, averaging_round, averaging_control, *arguments, timeout=timeout
        )
        if skipped:
            self.finished_averaging_round.set()
        if averaging_control is not None and has_succeeded(averaging_control) and self.dropped_tensors == dropped:
            self.mark_current()

    def mark_current(self) -> None:
        """Declare that the weights are those of `local_epoch` and contain all steps."""
        self.stale, self.missed_steps = False, 0

    def skip_to(self, epoch: int) -> None:
        """Count the steps up to `epoch` as taken; the next average of the weights will contain them."""
        self.missed_steps += epoch - self.local_epoch
        self.local_epoch, self.stale = epoch, True

    def schedule_step(self, **options: Any) -> StepControl:
        if self.stale:
            options["gather"] = STALE_EPOCH
        return super().schedule_step(**options)

    def state_tensors(self) -> list[Tensor]:
        """Parameters, then the optimizer's statistics, in the same order for all peers."""
        tensors = list(self._local_tensors())  # the parameters, since no statistics are averaged
        for state in [self.optimizer.state.get(parameter, {}) for parameter in tensors]:
            tensors += [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
        return [tensor.detach() for tensor in tensors]

    @property
    def version(self) -> tuple[int, int, int]:
        """Changes with the weights."""
        return self.weights_epoch, self.missed_steps, self.downloads

    @property
    def state_epoch(self) -> int:
        """The step of the weights, without steps that were only counted."""
        return max(0, self.weights_epoch - self.missed_steps)

    @torch.no_grad()
    def get_current_state(self) -> tuple[dict[str, Any], list[Tensor], None]:
        """For a newcomer: metadata with the `state_epoch` and the SHA-256 of the tensors, the tensors, and None for the
        compression info, which hivemind derives from them.

        Copied once per epoch, as the weights may change while they are sent.
        """
        with self._snapshot_lock:
            self.await_weights()
            if self._snapshot is None or self._snapshot[0] != self.version:
                self._snapshot = None  # frees its memory before the next copy
                with self.lock_optimizer, self.lock_averaged_tensors:
                    tensors = [tensor.cpu().clone() for tensor in self.state_tensors()]
                    version, epoch = self.version, self.state_epoch
                metadata = {"epoch": epoch, "sha256": tensors_sha256(tensors)}
                if self.host.donors and self.peer_id in self.host.donors:
                    metadata = sign_state(metadata, self.prefix, self.dht.private_key)
                self._snapshot = version, metadata, tensors
            _, metadata, tensors = self._snapshot
        return metadata, tensors, None

    def await_weights(self) -> None:
        """Wait until the weights contain the counted steps, for as long as an all-reduce may take."""
        deadline = time.monotonic() + (self._allreduce_timeout or math.inf)
        while self.weights_epoch != self.local_epoch and time.monotonic() < deadline:
            time.sleep(WEIGHTS_POLL_S)
        wait(list(self.pending_updates), max(0.0, deadline - time.monotonic()))

    def announced_donors(self) -> dict[PeerID, float]:
        """Peers that are announced as donors, with the announced epochs; anybody can announce anybody."""
        found = self.dht.get(f"{self.prefix}.all_averagers", latest=True)
        entries = found.value if found is not None and isinstance(found.value, dict) else {}
        return {
            PeerID(peer): float(entry.value)
            for peer, entry in entries.items()
            if isinstance(peer, bytes) and isinstance(entry, ValueWithExpiration)
            if isinstance(entry.value, float | int) and math.isfinite(entry.value)
            if peer != self.peer_id.to_bytes()
        }

    def known_donors(self) -> list[PeerID]:
        """The peers to ask for a state: the run's own donors first, announced or not, then the newest states."""
        announced = self.announced_donors()
        donors = list(announced.keys() | self.host.donors - {self.peer_id})
        random.shuffle(donors)
        # No announced step beyond the schedule puts a peer before those at its end.
        newest = {donor: min(epoch, self.last_epoch) for donor, epoch in announced.items()}
        donors.sort(key=lambda donor: (donor in self.host.donors, newest.get(donor, -1.0)), reverse=True)
        return donors[:MAX_DONORS]

    def load_state_from_peers(
        self,
        timeout: float = math.inf,
        min_epoch: int = 0,
        max_epoch: float = math.inf,
        *,
        donors_only: bool = False,
        each_s: float = math.inf,
        unsigned_share: float = math.inf,
    ) -> bool:
        """Adopt the first valid state; returns whether a donor of the run signed it, or True if the run names none.

        Args:
            timeout: seconds for each of the run's donors, and for all other peers together.
            min_epoch: earlier states are not downloaded.
            max_epoch: later states are refused unless a donor signed them.
            donors_only: ask no other peers than the run's donors.
            each_s: seconds for each peer that is not one of the run's donors.
            unsigned_share: how far the parameters of a state that no donor signed may be from this peer's, relative to
                their norm.

        Raises StateRefused if none is valid; it says what was wrong with each.
        """
        refusals, left_s = [], timeout
        for donor in self.known_donors():
            named, began_s = donor in self.host.donors, time.monotonic()
            if not named and (donors_only or left_s <= 0):
                continue
            try:
                allowed_s = timeout if named else min(left_s, each_s)
                metadata, tensors = self.download(donor, allowed_s, max(self.first_epoch, min_epoch))
                signed = state_signer(metadata, self.prefix) in self.host.donors
                if not signed and self.host.donors:
                    self.check_unsigned(metadata, max_epoch)
                self.adopt(metadata, tensors, math.inf if signed else unsigned_share)
                return signed or not self.host.donors
            except StateRefused as refusal:
                refusals.append(f"{donor.to_base58()[-8:]}: {refusal}")
            left_s -= 0.0 if named else time.monotonic() - began_s
        raise StateRefused("; ".join(refusals) or "nobody serves a state")

    def check_unsigned(self, metadata: Any, max_epoch: float) -> None:
        """StateRefused if a state without a donor's signature is refused whatever its held-out loss."""
        check_epoch(metadata, self.first_epoch)
        if metadata["epoch"] == self.first_epoch > 0:
            raise StateRefused("is of the run's first step, and no donor signed it")
        if metadata["epoch"] > max_epoch:
            raise StateRefused(f"is of step {metadata['epoch']}, which no donor has reached")
        if self.validate is None:
            raise StateRefused("no donor signed it, and there are no held-out samples to judge it by")

    def download(self, donor: PeerID, timeout: float, min_epoch: int) -> tuple[dict[str, Any], list[Tensor]]:
        """A donor's metadata and tensors, unchecked."""
        own = self.state_tensors()
        total, future = sum(tensor.nbytes for tensor in own), MPFuture()
        self._received_bytes.value = 0
        limits = {
            "limit_bytes": total + total // 100 + STATE_SLACK_BYTES,
            "expected": [(tensor.shape, tensor.dtype) for tensor in own],
            "min_epoch": min_epoch,
        }
        self._outer_pipe.send(("_download_state", [donor], {"timeout": timeout, "future": future, **limits}))
        deadline = time.monotonic() + timeout + PROCESS_GRACE_S
        while True:
            if time.monotonic() > deadline or not self.is_alive():
                raise StateRefused("the averager's process does not answer")
            try:
                outcome: tuple[dict[str, Any], list[Tensor]] | str = future.result(timeout=0.5)
                break
            except TimeoutError:
                self.on_download(min(self._received_bytes.value, total), total, donor.to_base58())
        if isinstance(outcome, str):
            raise StateRefused(outcome)
        self.on_download(total, total, donor.to_base58())
        return outcome

    async def _download_state(self, donor: PeerID, *, timeout: float, future: MPFuture, **limits: Any) -> None:
        """Runs in the averager's process; the future receives (metadata, tensors) or an error message."""
        try:
            future.set_result(await asyncio.wait_for(self._receive_state(donor, **limits), timeout))
        except TimeoutError:
            future.set_result(f"took longer than {timeout:.0f} s")
        except StateRefused as refusal:
            future.set_result(str(refusal))
        except Exception as error:  # whatever this peer does wrong, the next one is asked
            future.set_result(f"{type(error).__name__}: {error}".splitlines()[0][:200])

    async def _receive_state(
        self, donor: PeerID, limit_bytes: int, min_epoch: int, expected: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> tuple[dict[str, Any], list[Tensor]]:
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        metadata: Any = None
        parts: list[Any] = []
        tensors: list[Tensor] = []

        def take_tensor() -> None:
            if len(tensors) == len(expected):
                raise StateRefused(f"has more than the {len(expected)} tensors of this model")
            message = combine_from_streaming(parts)
            check_tensor(message, *expected[len(tensors)])
            tensors.append(deserialize_torch_tensor(message))

        # A donor sends nothing during an all-reduce.
        async for message in aiter_with_timeout(stream, timeout=self._allreduce_timeout):
            if message.metadata and metadata is None:
                metadata = self.serializer.loads(message.metadata)
                check_epoch(metadata, min_epoch, self.last_epoch)
            if not message.tensor_part.dtype and not message.tensor_part.buffer:
                raise StateRefused("sent an empty message")
            if message.tensor_part.dtype and parts:  # the first part of the next tensor
                take_tensor()
                parts.clear()
            parts.append(message.tensor_part)
            self._received_bytes.value += message.ByteSize() + MESSAGE_BYTES
            if self._received_bytes.value > limit_bytes:
                raise StateRefused(f"sent more than the {limit_bytes} bytes of a state")
        if parts:
            take_tensor()
        if metadata is None:
            raise StateRefused("has no state to serve")
        return metadata, tensors

    @torch.no_grad()
    def adopt(self, metadata: Any, tensors: Sequence[Tensor], max_share: float = math.inf) -> None:
        """Continue from a donor's state; StateRefused, with nothing changed, unless it passes all checks.

        max_share: how far its parameters may be from this peer's, relative to their norm.
        """
        own = self.state_tensors()
        check_epoch(metadata, self.local_epoch, self.last_epoch)
        check_state(metadata, tensors, own)
        parameters = tensors[: len(self.main_parameters)]
        if max_share < math.inf:
            check_near(own[: len(parameters)], parameters, max_share)
        if self.validate is not None:
            self.validate(parameters)
        with self.lock_optimizer, self.lock_averaged_tensors:
            copy_all(own, tensors)
            self.downloads += 1
        self._apply_optimizer_parameters_()
        self.local_epoch = metadata["epoch"]
        self.mark_current()
        self._update_scheduler()
