"""Three honest trainers and one enemy that takes part as they do: the honest ones learn nearly as without it."""

from statistics import median

import pytest

from tests.training.swarm.harness import Swarm, tell_figures

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
FIRST, STEPS = 2, 16


def fight(folder, nursery, **enemy):
    """The honest trainers' held-out losses after STEPS, and the seconds of a step since the enemy began."""
    with Swarm(folder, nursery=nursery) as swarm:
        swarm.start("helper")
        swarm.rewrite(min_peers=4)
        honest = [swarm.start("trainer", wait=False, samples_per_s=16, measure_at=STEPS) for _ in range(3)]
        swarm.start("trainer", "enemy", wait=False, samples_per_s=16, from_step=FIRST, **enemy)
        began_at = swarm.wait_for_common_step(honest, FIRST)
        ended_at = swarm.wait_for_common_step(honest, STEPS, 60 + 30 * STEPS)
        losses = [event["heldout_loss"] for peer in honest for event in peer.events("step") if "heldout_loss" in event]
    return losses, (ended_at - began_at) / (STEPS - FIRST)


@pytest.fixture(scope="module")
def clean(tmp_path_factory, nursery):
    return fight(tmp_path_factory.mktemp("clean"), nursery)


# Weights are averaged in smaller groups too: of two, nobody knows who is right, so a single trainer may be spoilt.
@pytest.mark.parametrize(("attack", "most"), [("opposite gradient", 1.05), ("noise for weights", 1.15)])
def test_an_enemy_costs_most_of_the_honest_little(tmp_path, nursery, clean, attack, most):
    losses, step_s = fight(tmp_path, nursery, misbehaviour=attack)
    clean_losses, clean_step_s = clean
    tell_figures(attack, losses=losses, without=clean_losses, step_s=round(step_s, 1), without_s=round(clean_step_s, 1))
    assert median(losses) < most * median(clean_losses)
    assert step_s < 1.5 * clean_step_s
