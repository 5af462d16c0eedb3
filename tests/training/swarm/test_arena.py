"""Three honest trainers and one enemy that takes part as they do: the honest ones learn as if it were not there."""

from functools import cache

import pytest

from tests.training.swarm.harness import Swarm, tell_figures

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
FIRST, STEPS = 2, 16
WITHIN = 1.05
"""The held-out loss may be this much larger than without an enemy."""


def fight(folder, nursery, steps, **enemy):
    """The honest trainers' held-out losses after `steps`, and the seconds of a step since the enemy began."""
    with Swarm(folder, nursery=nursery) as swarm:
        swarm.start("helper")
        swarm.rewrite(min_peers=4)
        honest = [swarm.start("trainer", wait=False, samples_per_s=16, measure_at=steps) for _ in range(3)]
        swarm.start("trainer", "enemy", wait=False, samples_per_s=16, from_step=FIRST, **enemy)
        began_at = swarm.wait_for_common_step(honest, FIRST)
        ended_at = swarm.wait_for_common_step(honest, steps, 60 + 30 * steps)
        losses = [event["heldout_loss"] for peer in honest for event in peer.events("step") if "heldout_loss" in event]
    return losses, (ended_at - began_at) / (steps - FIRST)


@pytest.fixture(scope="module")
def clean(tmp_path_factory, nursery):
    """The same without an enemy, by the number of steps."""
    return cache(lambda steps: fight(tmp_path_factory.mktemp("clean"), nursery, steps))


@pytest.mark.parametrize("attack", ["opposite gradient"])
def test_an_enemy_costs_the_honest_next_to_nothing(tmp_path, nursery, clean, attack):
    losses, step_s = fight(tmp_path, nursery, STEPS, misbehaviour=attack)
    clean_losses, clean_step_s = clean(STEPS)
    tell_figures(attack, losses=losses, without=clean_losses, step_s=round(step_s, 1), without_s=round(clean_step_s, 1))
    assert losses
    assert clean_losses
    assert max(losses) < WITHIN * min(clean_losses)
    assert step_s < 1.5 * clean_step_s
