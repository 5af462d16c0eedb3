"""The peers that keep a run alive without training: helpers reduce at known addresses, donors keep the state."""

from collections.abc import Callable
from functools import partial

import hivemind

from dalle_lean.errors import UserError
from dalle_lean.progress import OnNotice, silent
from training.data.loader import Batch
from training.step.gradients import GradientComputer
from training.swarm.averaging.attestation import Attestation
from training.swarm.averaging.state_validation import validate_state
from training.swarm.config import SwarmSettings
from training.swarm.host.checkpointer import Checkpointer, resume_from
from training.swarm.optimizer.build import swarm_optimizer
from training.swarm.optimizer.swarm_optimizer import SwarmOptimizer
from training.swarm.peer.gradient_worker import build_model

VALIDATION_SAMPLES = 8
"""Few, since a donor may measure on a CPU while the others go on."""
HELPER_PAUSE_S = 0.3
DONOR_PAUSE_S = 0.2

OnOptimizer = Callable[[SwarmOptimizer], None]


def run_helper(
    settings: SwarmSettings,
    dht: hivemind.DHT,
    wait: Callable[[float], bool],
    on_round: OnOptimizer = lambda _: None,
    attestation: Attestation | None = None,
) -> None:
    """Take part in every all-reduce as a reducer without data, until `wait(seconds)` is true.

    Args:
        on_round: called after each wait.
    """
    optimizer = swarm_optimizer(settings, build_model(settings), dht, role="helper", attestation=attestation)
    try:
        while not wait(HELPER_PAUSE_S):
            optimizer.step()
            on_round(optimizer)
    finally:
        optimizer.shutdown()


def run_donor(
    settings: SwarmSettings,
    dht: hivemind.DHT,
    wait: Callable[[float], bool],
    *,
    checkpointer: Checkpointer | None = None,
    on_round: OnOptimizer = lambda _: None,
    on_notice: OnNotice = silent,
) -> None:
    """Take every step with the others and serve the state, until `wait(seconds)` is true.

    With a checkpointer, also end with the schedule, once the final state is saved or `wait(seconds)` is true.

    Args:
        checkpointer: restores the newest checkpoint and saves later ones, including the final state. The first few of
            its held-out samples validate downloaded states; without them, every complete and finite state is accepted.
        on_round: called before the first wait, and after each.

    Raises OutOfSync, StateRefused, and UserError if the run's first weights are lost.
    """
    model, scale = build_model(settings), settings.steps_per_epoch
    restored = None if checkpointer is None else checkpointer.restore(model)
    optimizer = swarm_optimizer(settings, model, dht, role="donor", on_notice=on_notice)
    averager = optimizer.state_averager
    try:
        if checkpointer is not None and restored is not None:
            step, statistics = restored
            optimizer.away_s = checkpointer.away_s
            resume_from(optimizer, step // scale, statistics)
        elif optimizer.tracker.global_epoch < settings.first_epoch:
            raise UserError("the run's first weights are lost: host it again with --data and --init")
        if checkpointer is not None and checkpointer.heldout is not None:
            few = Batch(*(tensor[:VALIDATION_SAMPLES] for tensor in checkpointer.heldout))
            gradients = GradientComputer(model, settings.recipe.memory, micro_batch_size=1)
            averager.validate = partial(validate_state, gradients, few, averager.main_parameters)
        last_epoch = optimizer.local_epoch
        on_round(optimizer)  # the first step may take minutes
        while not wait(DONOR_PAUSE_S):
            optimizer.step(batch_size=0)
            if optimizer.local_epoch != last_epoch:
                last_epoch = optimizer.local_epoch
                if checkpointer is not None and averager.state_epoch == last_epoch:
                    checkpointer.poll(last_epoch * scale, optimizer, model)
            on_round(optimizer)
            if checkpointer is not None and last_epoch * scale >= settings.total_steps:
                break
        if checkpointer is not None:
            checkpointer.close(averager.state_epoch * scale, optimizer, model, wait)
            optimizer.tracker.saved_last_step = checkpointer.is_finished
    finally:
        optimizer.shutdown()
