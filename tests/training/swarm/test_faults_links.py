"""Slow links, and links that fail for a while."""

import time

import pytest

from tests.training.swarm import wires
from tests.training.swarm.figures import agreement, tell_figures
from tests.training.swarm.harness import Swarm
from tests.training.swarm.wires import Wires
from training.swarm.config import TimingSection

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(wires.why_not()), reason=wires.why_not() or "nothing"),
]
NAMES = ("helper1", "helper2", "donor1", "trainer1", "trainer2", "trainer3")
BATCH_SIZE = 128  # a step due every 3 s
TIMING = TimingSection(
    matchmaking_time_s=3.0,
    request_timeout_s=2.0,
    averaging_timeout_s=30.0,
    next_chunk_timeout_s=6.0,
    load_state_timeout_s=40.0,
    progress_expiration_s=15.0,
)


@pytest.fixture
def wired():
    with Wires(NAMES, bits_per_s=20e6, delay_s=0.05) as laid:
        yield laid


def test_peers_on_slow_links_stay_together(tmp_path, nursery, wired):
    with Swarm(tmp_path, timing=TIMING, batch_size=BATCH_SIZE, hosts=wired.hosts, nursery=nursery) as swarm:
        trainers = swarm.start_usual(trainers=3)
        began_at, began = time.time(), max(trainer.step for trainer in trainers)
        sent = wired.sent_bytes()
        ended_at = swarm.wait_for_common_step(trainers, began + 5, 120)
        sent_bytes = sum(wired.sent_bytes().values()) - sum(sent.values())
        tell_figures(
            "20 Mbit/s and 50 ms",
            seconds_per_step=round((ended_at - began_at) / 5, 1),
            sent_bytes_per_step=round(sent_bytes / 5),
            **agreement(trainers, began_at),
        )


def test_a_swarm_that_was_parted_for_30_s_becomes_one_again(tmp_path, nursery, wired):
    with Swarm(tmp_path, timing=TIMING, batch_size=BATCH_SIZE, hosts=wired.hosts, nursery=nursery) as swarm:
        trainers = swarm.start_usual(trainers=3)
        wired.part(["helper1", "donor1", "trainer1", "trainer2"], ["helper2", "trainer3"])
        time.sleep(30)
        steps = {trainer.name: trainer.step for trainer in trainers}
        wired.part()
        healed_at = time.time()
        tell_figures("parted for 30 s", steps_when_healed=steps, **agreement(trainers, healed_at, timeout_s=120))
