"""Numbers that are not finite spoil nobody else's model."""

import math
import time

import numpy as np
import pytest

from tests.training.swarm.harness import Swarm, greatest_difference, tell_figures
from training.swarm.settings import WireSection

pytestmark = pytest.mark.swarm


@pytest.fixture(scope="module")
def module_swarm(tmp_path_factory, nursery):
    """With 8 bits on the wire for nearly all tensors: one nan spoils the whole of a quantized one."""
    wire = WireSection(min_eight_bit_numel=256)
    with Swarm(tmp_path_factory.mktemp("swarm"), wire=wire, nursery=nursery) as swarm:
        swarm.start_usual()
        yield swarm


STEPS = [3, pytest.param(10, marks=pytest.mark.slow)]


@pytest.mark.parametrize("steps", STEPS)
def test_a_peer_with_nan_gradients_drops_them_itself(standing, steps):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    first = others[0].step + 3
    broken = standing.start("trainer", samples_per_s=16, misbehaviour="own_nan", from_step=first, for_steps=steps)
    standing.wait_for_common_step([broken, *others], first + steps + 2, 60 + 15 * steps)
    _, apart = greatest_difference([broken, *others])
    tell_figures(
        "nan gradients of a peer's own",
        dropped_batches=broken.last("step")["dropped_batches"],
        greatest_difference=apart,
    )
    assert broken.last("step")["dropped_batches"] > 0
    check_health([broken, *others], since_step=first)
    broken.kill()


@pytest.mark.parametrize("steps", STEPS)
def test_nan_from_a_hostile_peer_is_left_out(standing, steps):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    first = others[0].step + 3
    hostile = standing.start("trainer", samples_per_s=16, misbehaviour="hostile_nan", from_step=first, for_steps=steps)
    hostile.wait_for_event("misbehaves", 60)
    began = time.time()
    standing.wait_for_common_step(others, first + steps + 2, 60 + 15 * steps)
    _, apart = greatest_difference(others)
    tell_figures(
        "nan from a hostile peer",
        seconds_per_step=round((time.time() - began) / (steps + 2), 1),
        greatest_difference=apart,
        dropped_tensors=[other.last("step")["dropped_tensors"] for other in others],
    )
    check_health(others, since_step=first)
    hostile.kill()


def check_health(members, since_step):
    """Losses, where there are any, and parameters are finite."""
    for member in members:
        for event in member.events("step"):
            if event["epoch"] >= since_step:
                assert event["loss"] is None or math.isfinite(event["loss"])
                assert np.isfinite(member.parameters(event["parameters_of"])).all()
        assert any(event["loss"] is not None for event in member.events("step") if event["epoch"] > since_step)
