"""The peers that keep a run alive without training: helpers reduce and are known addresses, donors keep the state."""

from collections.abc import Callable
from functools import partial

import hivemind
from torch import Tensor

from dalle_lean import Dalle
from training.data.loader import Batch
from training.data.remote_io import silent
from training.run.progress import OnNotice
from training.step.gradients import GradientComputer
from training.swarm.averaging.state_validation import validate_state
from training.swarm.config import SwarmSettings
from training.swarm.host.checkpointer import go_on_from
from training.swarm.optimizer.build import swarm_optimizer
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer
from training.swarm.peer.gradient_worker import build_model

JUDGE_SAMPLES = 8
"""On a CPU, perhaps, and while the others go on."""
HELPER_PAUSE_S = 0.3
DONOR_PAUSE_S = 0.2


def run_helper(
    settings: SwarmSettings,
    dht: hivemind.DHT,
    wait: Callable[[float], bool],
    on_round: Callable[[SwarmOptimizer], None] | None = None,
) -> None:
    """Take part in every all-reduce as a reducer that brings nothing itself, until `wait(seconds)` is true.

    Args:
        on_round: called every now and then.
    """
    optimizer = swarm_optimizer(settings, build_model(settings), dht, role="helper")
    try:
        while not wait(HELPER_PAUSE_S):
            optimizer.step()
            if on_round is not None:
                on_round(optimizer)
    finally:
        optimizer.shutdown()


def run_donor(
    settings: SwarmSettings,
    dht: hivemind.DHT,
    wait: Callable[[float], bool],
    on_step: Callable[[SwarmOptimizer], None] | None = None,
    *,
    model: Dalle | None = None,
    heldout: Batch | None = None,
    begin_with: tuple[int, list[Tensor]] | None = None,
    on_round: Callable[[SwarmOptimizer], None] | None = None,
    on_leave: Callable[[SwarmOptimizer], None] | None = None,
    on_notice: OnNotice = silent,
) -> None:
    """Go every step with the others and hand out the state, until `wait(seconds)` is true.

    Args:
        on_step: called after each step of the swarm; the model's weights are those of that step.
        model: with the weights to begin with; without it the run's first.
        heldout: by the first few of these samples the states of others are judged; without them all are taken that are
            whole and finite.
        begin_with: the step of the swarm that these weights are of, and the optimizer's statistics.
        on_round: called every now and then.
        on_leave: called at the end, before the others are left.
        on_notice: called when this peer is behind the others, and with how it goes on.

    Raises OutOfSync, StateRefused.
    """
    model = model or build_model(settings)
    optimizer = swarm_optimizer(settings, model, dht, role="donor", on_notice=on_notice)
    averager = optimizer.state_averager
    try:
        if begin_with is not None:
            go_on_from(optimizer, *begin_with)
        if heldout is not None:
            few = Batch(*(tensor[:JUDGE_SAMPLES] for tensor in heldout))
            gradients = GradientComputer(model, settings.recipe.memory, micro_batch_size=1)
            averager.validate = partial(validate_state, gradients, few, averager.main_parameters)
        seen = optimizer.local_epoch
        while not wait(DONOR_PAUSE_S):
            optimizer.step(batch_size=0)
            if optimizer.local_epoch != seen:
                seen = optimizer.local_epoch
                if on_step is not None:
                    on_step(optimizer)
            if on_round is not None:
                on_round(optimizer)
        if on_leave is not None:
            on_leave(optimizer)
    finally:
        optimizer.shutdown()
