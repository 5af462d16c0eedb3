"""A few minutes of random kills; `python -m benchmarks.swarm soak --minutes 30` takes longer."""

import pytest

from tests.training.swarm.figures import tell_figures
from tests.training.swarm.soak import TRAINERS, soak

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(400)]


def test_random_kills_leave_no_orphan_and_the_memory_flat(tmp_path, nursery):
    figures = soak(tmp_path, 60, nursery=nursery)
    tell_figures("random kills", **figures)
    memory = figures["memory_mb"]
    assert figures["steps"] >= 6
    assert figures["trainers_alive"] == TRAINERS
    assert memory[-1] < 1.15 * memory[len(memory) // 3]
