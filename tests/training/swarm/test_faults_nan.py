"""Values that are not finite spoil nobody else's model."""

import math

import numpy as np
import pytest

from tests.training.swarm.figures import greatest_difference, tell_figures
from tests.training.swarm.harness import Swarm
from training.swarm.config import WireSection

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
FIRST = 2
WIRE = WireSection(min_eight_bit_numel=256)
"""8 bits for nearly all tensors of a tiny model: one nan spoils a whole quantized tensor."""
STEPS = 4
"""In which there is nan."""


def test_a_peer_with_nan_gradients_drops_them_itself(tmp_path, nursery):
    with Swarm(tmp_path, wire=WIRE, nursery=nursery) as swarm:
        others, broken = start_with_one_more(swarm, misbehaviour="own_nan", for_steps=STEPS)
        swarm.wait_for_common_step([broken, *others], FIRST + STEPS + 2, 100 + 15 * STEPS)
        step, apart = greatest_difference([broken, *others])
        check_health([broken, *others])
        dropped = broken.last("step")["dropped_batches"]
        tell_figures("nan gradients of a peer's own", dropped_batches=dropped, step=step, greatest_difference=apart)
        assert dropped >= STEPS


def test_nan_from_a_hostile_peer_is_left_out(tmp_path, nursery):
    with Swarm(tmp_path, wire=WIRE, nursery=nursery) as swarm:
        others, hostile = start_with_one_more(swarm, misbehaviour="hostile_nan", for_steps=STEPS)
        began_at = swarm.wait_for_common_step(others, FIRST)
        ended_at = swarm.wait_for_common_step(others, FIRST + STEPS + 2, 100 + 15 * STEPS)
        assert list(hostile.events("misbehaves"))  # the others may avoid it from then on
        check_health(others)
        step, apart = greatest_difference(others)
        tell_figures(
            "nan from a hostile peer",
            seconds_per_step=round((ended_at - began_at) / (STEPS + 2), 1),
            dropped_tensors=[other.last("step")["dropped_tensors"] for other in others],
            step=step,
            greatest_difference=apart,
        )


def start_with_one_more(swarm, **spec):
    """A helper, two good trainers, and one that misbehaves from step FIRST; returns the two and the one."""
    swarm.start("helper")
    swarm.rewrite(min_peers=3)
    others = [swarm.start("trainer", wait=False, samples_per_s=16) for _ in range(2)]
    return others, swarm.start("trainer", wait=False, samples_per_s=16, from_step=FIRST, **spec)


def check_health(members):
    """Losses, where there are any, and parameters are finite, and there was a loss since the misbehaviour began."""
    for member in members:
        steps = [event for event in member.events("step") if event["epoch"] > FIRST]
        for event in steps:
            assert event["loss"] is None or math.isfinite(event["loss"])
            assert np.isfinite(member.parameters(event["parameters_of"])).all()
        assert any(event["loss"] is not None for event in steps)
