"""What trainers do that come to a run, or back to one, after its last step."""

import time

import pytest

from tests.training.swarm.harness import TIMING, Swarm, wait_for

pytestmark = [pytest.mark.swarm, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 3
LEAVE_S = 25.0
"""Much less than the minute for which a trainer stays for a donor."""


@pytest.fixture
def swarm(tmp_path, nursery):
    """A helper and a donor that saves the last step, then leaves."""
    with Swarm(tmp_path, nursery=nursery, batch_size=32, total_steps=STEPS, warmup_steps=1) as swarm:
        swarm.name_host("helper1", "donor1")
        swarm.start("helper")
        swarm.start("donor", checkpoints=str(tmp_path))
        yield swarm


def has_left(member):
    return bool(member.events("left"))


def has_saved(donor, step):
    return any(event["saved_step"] == step for event in donor.events("checkpoint"))


def texts(member):
    return [event["text"] for event in member.events("notice")]


def test_a_newcomer_to_a_run_whose_end_was_reached_does_not_train(swarm):
    first = swarm.start("trainer", samples_per_s=16.0)
    for member in (first, swarm.member("donor1")):
        wait_for(lambda member=member: has_left(member), 180, f"{member.name} to leave")
    time.sleep(TIMING.progress_expiration_s)  # of what the peers said while they were there
    late = swarm.start("trainer", samples_per_s=16.0)
    wait_for(lambda: has_left(late), 60, "the newcomer to leave")
    assert texts(late) == [f"the run is over: its last step, {STEPS}, is done"]
    assert not late.events("batch")
    assert not late.events("failed")


def test_trainers_that_miss_the_end_of_the_run_leave_once_they_are_back(swarm):
    last, behind = (swarm.start("trainer", samples_per_s=rate) for rate in (16.0, 4.0))
    donor = swarm.member("donor1")
    swarm.wait_for_common_step([last, behind], STEPS - 1)
    behind.freeze()
    wait_for(lambda: has_saved(donor, STEPS), 120, "the donor to save the last step")  # it needs a trainer for that
    last.freeze()
    wait_for(lambda: has_left(donor), 60, "the donor to leave")
    time.sleep(TIMING.progress_expiration_s)
    for member in (last, behind):
        member.thaw()
    for member in (last, behind):
        wait_for(lambda member=member: has_left(member), LEAVE_S, f"{member.name} to leave")
        assert not member.events("failed")
