"""Newcomers: through another helper, from another donor, late, and behind a firewall."""

import time

import pytest

from tests.training.swarm.harness import Swarm, difference_at, greatest_difference, tell_figures

pytestmark = pytest.mark.swarm
AGREEMENT = 1e-3


def common_step_since(member, others, since):
    """The first step that the member kept after a time and all others did too."""
    kept = set.intersection(member.steps_kept(), *(other.steps_kept() for other in others))
    fresh = [event["parameters_of"] for event in member.events("step") if event["time"] > since]
    return min(step for step in fresh if step in kept)


def test_a_newcomer_equals_the_others_after_one_step(standing):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    started_at = time.time()
    newcomer = standing.start("trainer", samples_per_s=16)
    adopted = newcomer.wait_for_event("adopted", 30)
    first = newcomer.wait_for_step(adopted["epoch"] + 1, 30)
    standing.wait_for_common_step([newcomer, *others], newcomer.step + 1, 40)
    step = common_step_since(newcomer, others, first - 0.01)
    apart = difference_at([newcomer, *others], step)
    tell_figures(
        "a newcomer",
        at_step=adopted["epoch"],
        state_after_s=round(adopted["time"] - started_at, 1),
        step_after_s=round(first - started_at, 1),
        greatest_difference=apart,
    )
    assert apart < AGREEMENT
    newcomer.kill()


def test_newcomers_find_the_run_when_its_first_helper_is_dead(standing):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    standing.member("helper1").kill()
    killed_at = time.time()
    newcomer = standing.start("trainer", samples_per_s=16)
    here = newcomer.last("here")["time"]
    pause_s = standing.go_on(others, killed_at)
    newcomer.wait_for_event("adopted", 30)
    standing.wait_for_common_step([newcomer, *others], max(other.step for other in others) + 1, 40)
    _, apart = greatest_difference([newcomer, *others])
    tell_figures(
        "the bootstrap helper is killed",
        newcomer_in_s=round(here - killed_at, 1),
        next_common_step_s=round(pause_s, 1),
        greatest_difference=apart,
    )
    assert apart < AGREEMENT
    newcomer.kill()


def test_a_download_goes_on_with_another_donor_when_the_first_is_killed(standing):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    slow = standing.start("donor", name="donor-slow", slow_upload=True)
    slow.wait_for_event("step", 40)
    standing.name_donors(slow)
    newcomer = standing.start("trainer", samples_per_s=16)
    newcomer.wait(lambda: any(e["received"] > 0 for e in newcomer.events("download")), 30, "part of the state")
    assert not newcomer.events("adopted")
    slow.kill()
    killed_at = time.time()
    adopted = newcomer.wait_for_event("adopted", 40)
    standing.wait_for_common_step([newcomer, *others], max(other.step for other in others) + 1, 40)
    _, apart = greatest_difference([newcomer, *others])
    tell_figures(
        "the donor is killed in a download",
        state_after_s=round(adopted["time"] - killed_at, 1),
        greatest_difference=apart,
    )
    assert newcomer.last("download")["donor"] != slow.last("here")["peer"]
    assert apart < AGREEMENT
    newcomer.kill()


@pytest.mark.slow
def test_trainers_behind_firewalls_need_helpers_only(tmp_path, nursery):
    with Swarm(tmp_path, nursery=nursery) as swarm:
        swarm.start("helper")
        swarm.start("helper")
        swarm.start("donor", wait=False)
        trainers = [swarm.start("trainer", wait=False, samples_per_s=16, client_mode=True) for _ in range(3)]
        swarm.wait_for_common_step(trainers, 2)
        began_at, began = time.time(), max(trainer.step for trainer in trainers)
        swarm.wait_for_common_step(trainers, began + 5, 60)
        _, apart = greatest_difference(trainers)
        assert all(trainer.last("here")["addresses"] == [] for trainer in trainers)
        tell_figures(
            "client mode only", seconds_per_step=round((time.time() - began_at) / 5, 1), greatest_difference=apart
        )
        assert apart < AGREEMENT
