"""kill -9 of a trainer, at any moment: the others go on and agree, and nothing of it stays behind."""

import time

import pytest

from tests.training.swarm.harness import agreement, samples_since_step, tell_figures, wait_for

pytestmark = pytest.mark.swarm


def join_a_trainer(swarm):
    """One more, until it has gone a step with the others."""
    victim = swarm.start("trainer", samples_per_s=16)
    victim.wait_for_event("step", 30)
    victim.wait_for_step(victim.step + 1, 30)
    return victim


@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("compute", marks=pytest.mark.slow),
        pytest.param("matchmaking", marks=pytest.mark.slow),
        "all-reduce",
    ],
)
def test_a_trainer_killed_in_any_stage_costs_its_own_samples_only(standing, stage):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    victim = join_a_trainer(standing)
    killed_at = victim.kill_in(stage)
    pause_s = standing.go_on(others, killed_at)
    tell_figures(
        f"kill -9 in {stage}",
        lost_samples=samples_since_step(victim),
        next_common_step_s=round(pause_s, 1),
        **agreement(others, killed_at),
    )


def test_no_process_outlives_a_killed_main_process(standing):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    victim = join_a_trainer(standing)
    names = {process.name() for process in victim.processes}
    assert "p2pd" in names
    assert len(victim.processes) >= 5  # the DHT, two averagers and p2pd beside it
    victim.kill_main()
    killed_at = time.time()
    wait_for(lambda: not victim.processes, 5, "the dead trainer's processes to be gone")
    gone_s = time.time() - killed_at
    pause_s = standing.go_on(others, killed_at)
    tell_figures(
        "kill -9 of the main process",
        orphans_gone_s=round(gone_s, 1),
        lost_samples=samples_since_step(victim),
        next_common_step_s=round(pause_s, 1),
        **agreement(others, killed_at),
    )
