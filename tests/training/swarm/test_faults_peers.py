"""Members join and are killed at any moment: the others continue and agree, and no process is left behind."""

import time

import pytest

from tests.training.swarm.enemy import forge_progress
from tests.training.swarm.figures import agreement, samples_since_step, tell_figures
from tests.training.swarm.harness import Swarm, wait_for
from training.swarm.network.dht import open_dht

pytestmark = [pytest.mark.swarm, pytest.mark.slow]


def join_a_trainer(swarm):
    """Start another trainer; returns after its first step with the others."""
    victim = swarm.start("trainer", samples_per_s=16)
    victim.wait_for_event("step")
    victim.wait_for_step(victim.step + 1)
    return victim


@pytest.mark.parametrize("stage", ["compute", "matchmaking", "all-reduce"])
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
    wait_for(lambda: not victim.processes, 10, "the dead trainer's processes to be gone")
    gone_s = time.time() - killed_at
    pause_s = standing.go_on(others, killed_at)
    tell_figures(
        "kill -9 of the main process",
        orphans_gone_s=round(gone_s, 1),
        lost_samples=samples_since_step(victim),
        next_common_step_s=round(pause_s, 1),
        **agreement(others, killed_at),
    )


def test_a_newcomer_equals_the_others_after_one_step(tmp_path, nursery):
    with Swarm(tmp_path, batch_size=32, nursery=nursery) as swarm:
        others = swarm.start_usual()
        swarm.wait_for_common_step(others, 12)
        started_at = time.time()
        newcomer = swarm.start("trainer", samples_per_s=16)
        adopted = newcomer.wait_for_event("adopted")
        stepped_at = newcomer.wait_for_step(adopted["epoch"] + 1)
        tell_figures(
            "a newcomer",
            at_step=adopted["epoch"],
            state_after_s=round(adopted["time"] - started_at, 1),
            step_after_s=round(stepped_at - started_at, 1),
            **agreement([newcomer, *others], stepped_at - 0.1),
        )


def test_newcomers_find_the_run_when_its_first_helper_is_dead(standing):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    standing.member("helper1").kill()
    killed_at = time.time()
    newcomer = standing.start("trainer", samples_per_s=16)
    newcomer_in_s = newcomer.last("here")["time"] - killed_at
    pause_s = standing.go_on(others, killed_at, steps=2)
    adopted = newcomer.wait_for_event("adopted")
    tell_figures(
        "the bootstrap helper is killed",
        newcomer_in_s=round(newcomer_in_s, 1),
        state_after_s=round(adopted["time"] - killed_at, 1),
        next_common_step_s=round(pause_s, 1),
        **agreement([newcomer, *others], adopted["time"]),
    )
    newcomer.kill()


def test_a_download_goes_on_with_another_donor_when_the_first_is_killed(standing):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    slow = standing.start("donor", name="donor-slow", slow_upload=True)
    slow.wait_for_event("step")
    standing.name_donors(slow)
    newcomer = standing.start("trainer", samples_per_s=16)
    newcomer.wait(lambda: any(e["received"] > 0 for e in newcomer.events("download")), 60, "part of the state")
    assert not newcomer.events("adopted")
    slow.kill()
    killed_at = time.time()
    adopted = newcomer.wait_for_event("adopted")
    assert newcomer.last("download")["donor"] != slow.last("here")["peer"]
    tell_figures(
        "the donor is killed in a download",
        state_after_s=round(adopted["time"] - killed_at, 1),
        **agreement([newcomer, *others], adopted["time"]),
    )
    newcomer.kill()


def test_a_forged_record_of_a_step_far_away_stops_nobody(standing):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    forged_at, epoch = time.time(), standing.settings.last_epoch - 1
    dht = open_dht(standing.addresses, client_mode=True, reads_all=True)
    try:
        forge_progress(dht, standing.settings.run_id, epoch)
        pause_s = standing.go_on(others, forged_at)
    finally:
        dht.shutdown()
    tell_figures("a forged record", next_common_step_s=round(pause_s, 1), **agreement(others, forged_at))
    for member in others:
        assert not any(f"the swarm at {epoch}" in event["text"] for event in member.events("notice"))  # not believed
        assert member.step < epoch / 2


def test_trainers_behind_firewalls_need_helpers_only(tmp_path, nursery):
    with Swarm(tmp_path, nursery=nursery) as swarm:
        swarm.start("helper")
        swarm.start("helper")
        swarm.rewrite(min_peers=3)
        swarm.start("donor", wait=False)
        trainers = [swarm.start("trainer", wait=False, samples_per_s=16, client_mode=True) for _ in range(3)]
        began_at = swarm.wait_for_common_step(trainers, 2)
        began = max(trainer.step for trainer in trainers)
        ended_at = swarm.wait_for_common_step(trainers, began + 5, 100)
        assert all(trainer.last("here")["addresses"] == [] for trainer in trainers)
        tell_figures(
            "client mode only",
            seconds_per_step=round((ended_at - began_at) / (began + 3), 1),
            **agreement(trainers, began_at),
        )
