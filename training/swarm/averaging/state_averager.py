"""Averaging of weights over the peers that are at the same step."""

from collections.abc import Callable
from statistics import median_high
from typing import Any

from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from torch import Tensor

from training.swarm.averaging.averagers import FilteredAverager, has_succeeded

STALE_EPOCH = -1
"""Reported by peers whose weights are older than the current step."""
STALE_WEIGHT = 1e-6
"""Weight of a peer that became stale after it reported its step: negligible next to others, yet enough for a mean if
all are stale."""


class WeightAverager(FilteredAverager, TrainingStateAverager):
    """Averages the weights and tracks the step that they belong to.

    Args:
        lr_of_epoch: maps an epoch to the learning rate of the step that follows it.
    """

    max_shift = 0.5
    """Weights of one step are close to each other."""
    local_epoch: int
    weights_epoch: int
    """The step of the weights: `local_epoch`, or the one before while a delayed step is running."""
    times_applied: int
    """How often the averager has written weights into the model."""
    stale: bool
    """Whether the weights are older than `local_epoch`; they have no weight until the next average."""
    missed_steps: int
    """Steps up to `weights_epoch` that the weights do not contain."""

    def __init__(self, *, lr_of_epoch: Callable[[int], float], **options: Any):
        self.lr_of_epoch = lr_of_epoch
        self.skip_next_round = False
        """Set if the step's gradients were averaged with nobody."""
        self._control: StepControl | None = None
        self.weights_epoch = self.times_applied = self.missed_steps = 0
        self.stale = False
        super().__init__(**options)
        self._update_scheduler()

    def _update_scheduler(self) -> None:
        # hivemind calls it right after a step, before other threads may read the weights.
        self.weights_epoch = self.local_epoch
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr_of_epoch(self.local_epoch)
        for state in self.optimizer.state.values():
            if "step" in state and not isinstance(state["step"], Tensor):
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
        self._control = averaging_control
        if self.stale and averaging_control is not None and not averaging_control.began_allreduce:
            averaging_control.weight = STALE_WEIGHT
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
            self.mark_current()

    def mark_current(self) -> None:
        """Declare that the weights are those of `local_epoch` and contain all steps."""
        self.stale, self.missed_steps = False, 0

    def skip_to(self, epoch: int) -> None:
        """Count the steps up to `epoch` as taken; the next average of the weights will contain them."""
        self.missed_steps += epoch - self.local_epoch
        self.local_epoch, self.stale = epoch, True

    def schedule_step(self, scheduled_time: float | None = None, **options: Any) -> StepControl:
        if self.stale:
            options["gather"] = STALE_EPOCH
        return super().schedule_step(scheduled_time, **options)

    def stop_matchmaking(self) -> None:
        """Stop looking for a group; a running all-reduce continues."""
        control = self._control
        if control is not None and not control.done() and control.stage != AveragingStage.RUNNING_ALLREDUCE:
            control.cancel()


def out_of_step(group_info: GroupInfo) -> set[PeerID]:
    """The members of a group whose reported step is not the median."""
    reported = zip(group_info.peer_ids, group_info.gathered, strict=True)
    epochs = {peer: epoch for peer, content in reported if (epoch := reported_epoch(content)) is not None}
    current = median_high([epoch for epoch in epochs.values() if epoch != STALE_EPOCH] or [STALE_EPOCH])
    return {peer for peer, epoch in epochs.items() if epoch != current}


def reported_epoch(content: bytes) -> int | None:
    """The step in a member's report; None for peers without weights, STALE_EPOCH if malformed."""
    try:
        _bandwidth, mode, gathered = MSGPackSerializer.loads(content)
        epoch = MSGPackSerializer.loads(gathered)
    except Exception:  # untrusted bytes may raise anything
        return STALE_EPOCH
    if mode == AveragingMode.AUX.value:
        return None
    return epoch if type(epoch) is int else STALE_EPOCH
