"""Three honest trainers and one enemy that takes part as they do: the honest ones learn nearly as without it."""

from contextlib import ExitStack
from statistics import median

import pytest

from tests.training.swarm.figures import tell_figures
from tests.training.swarm.harness import Swarm
from tests.training.swarm.test_faults_peers import forge_progress
from training.swarm.network.dht import open_dht

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
FIRST, STEPS = 2, 16


def fight(folder, nursery, steps=STEPS, claims=0, **enemy):
    """The honest trainers' held-out losses after `steps`, and the seconds of a step since the enemy began.

    Args:
        claims: made-up identities that say they have gone the last step.
        enemy: what the enemy is told; nothing is no enemy.
    """
    with Swarm(folder, nursery=nursery) as swarm, ExitStack() as stack:
        swarm.name_host("helper1", "donor1")
        swarm.start("helper")
        swarm.rewrite(min_peers=4)
        swarm.start("donor", wait=False)
        honest = [swarm.start("trainer", wait=False, samples_per_s=16, measure_at=steps) for _ in range(3)]
        swarm.start("trainer", "enemy", wait=False, samples_per_s=16, from_step=FIRST, **enemy)
        began_at = swarm.wait_for_common_step(honest, FIRST)
        for _ in range(claims):
            stranger = open_dht(swarm.addresses, client_mode=True)
            stack.callback(stranger.shutdown)
            forge_progress(stranger, swarm.settings.run_id, swarm.settings.last_epoch)
        ended_at = swarm.wait_for_common_step(honest, steps, 60 + 30 * steps)
        losses = [event["heldout_loss"] for peer in honest for event in peer.events("step") if "heldout_loss" in event]
    return losses, (ended_at - began_at) / (steps - FIRST)


@pytest.fixture(scope="module")
def clean(tmp_path_factory, nursery):
    return fight(tmp_path_factory.mktemp("clean"), nursery)


@pytest.mark.parametrize(
    ("attack", "slower"),
    [
        ({"misbehaviour": "opposite gradient"}, 1.5),
        ({"misbehaviour": "noise for weights"}, 1.5),
        ({"misbehaviour": "garbage for an average"}, 1.5),
        ({"misbehaviour": "ghost"}, 2.0),
        ({"claims": 2}, 1.5),
    ],
    ids=lambda attack: "-".join(map(str, attack.values())) if isinstance(attack, dict) else None,
)
def test_an_enemy_costs_the_honest_little(tmp_path, nursery, clean, attack, slower):
    losses, step_s = fight(tmp_path, nursery, **attack)
    clean_losses, clean_step_s = clean
    tell_figures(
        str(attack), losses=losses, without=clean_losses, step_s=round(step_s, 1), without_s=round(clean_step_s, 1)
    )
    assert max(losses) < 1.05 * median(clean_losses)
    assert step_s < slower * clean_step_s
