"""The peers that keep a run alive without training: helpers reduce and are known addresses, donors keep the state."""

from collections.abc import Callable

import hivemind

from training.swarm.optimizer import SwarmOptimizer, swarm_optimizer
from training.swarm.peer import build_model
from training.swarm.settings import SwarmSettings

HELPER_PAUSE_S = 0.3
DONOR_PAUSE_S = 0.2


def run_helper(settings: SwarmSettings, dht: hivemind.DHT, wait: Callable[[float], bool]) -> None:
    """Take part in every all-reduce as a reducer that brings nothing itself, until `wait(seconds)` is true."""
    optimizer = swarm_optimizer(settings, build_model(settings), dht, role="helper")
    try:
        while not wait(HELPER_PAUSE_S):
            optimizer.step()
    finally:
        optimizer.shutdown()


def run_donor(
    settings: SwarmSettings,
    dht: hivemind.DHT,
    wait: Callable[[float], bool],
    on_step: Callable[[SwarmOptimizer], None] | None = None,
) -> None:
    """Go every step with the others and hand out the state, until `wait(seconds)` is true.

    Args:
        on_step: called after each step of the swarm; the model's weights are those of that step.
    """
    optimizer = swarm_optimizer(settings, build_model(settings), dht, role="donor")
    seen = optimizer.local_epoch
    try:
        while not wait(DONOR_PAUSE_S):
            optimizer.step(batch_size=0)
            if optimizer.local_epoch != seen:
                seen = optimizer.local_epoch
                if on_step is not None:
                    on_step(optimizer)
    finally:
        optimizer.shutdown()
