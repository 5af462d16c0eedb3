"""Three honest trainers and an attacker that follows the protocol: they learn nearly as well as without it."""

from statistics import median

import pytest

from tests.training.swarm.arena import ATTACKS, fight
from tests.training.swarm.figures import tell_figures

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
STEPS = 10
SLOWER = {"ghost": 2.0}
"""Largest slowdown by enemies for which it may exceed 1.5."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory, nursery):
    return fight(tmp_path_factory.mktemp("clean"), nursery, steps=STEPS)


@pytest.mark.parametrize(
    "attack", ["opposite gradient, noise for weights and claims", "garbage for an average", "ghost"]
)
def test_an_enemy_costs_the_honest_little(tmp_path, nursery, clean, attack):
    found = fight(tmp_path, nursery, steps=STEPS, **ATTACKS[attack])
    tell_figures(attack, **found._asdict(), clean=clean._asdict())
    assert max(found.heldout_losses) < 1.05 * median(clean.heldout_losses)
    assert found.step_s < SLOWER.get(attack, 1.5) * clean.step_s
    assert found.grown_mb < clean.grown_mb + 100
