"""A slow peer, and a full disk."""

import shutil
import subprocess
import time

import pytest

from tests.training.swarm import wires
from tests.training.swarm.figures import agreement, tell_figures
from tests.training.swarm.harness import Swarm
from training.swarm.host.checkpoints import list_checkpoints

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
STEPS = 5
NO_SLOWER = 0.9


def samples_per_s(swarm, trainers, steps=STEPS):
    """Of all together, over some steps."""
    began = max(trainer.step for trainer in trainers) + 1
    began_at = swarm.wait_for_common_step(trainers, began)
    ended_at = swarm.wait_for_common_step(trainers, began + steps, 120)
    return steps * swarm.settings.target_batch_size / (ended_at - began_at)


def test_a_peer_at_a_tenth_of_the_speed_does_not_slow_the_others(standing):
    others = [standing.member("trainer1"), standing.member("trainer2")]
    alone = samples_per_s(standing, others)
    slow = standing.start("trainer", samples_per_s=1.6, batch_size=1)
    slow.wait_for_event("adopted", 60)
    slow.wait_for_step(slow.last("adopted")["epoch"] + 1)
    joined_at = time.time()
    beside = samples_per_s(standing, [slow, *others])
    again = samples_per_s(standing, others)
    tell_figures(
        "a peer at a tenth of the speed",
        samples_per_s_without=round(alone, 1),
        samples_per_s_with=[round(beside, 1), round(again, 1)],
        slow_one_brought=slow.last("step")["samples"],
        **agreement([slow, *others], joined_at),
    )
    slow.kill()
    assert max(beside, again) > NO_SLOWER * alone


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MB."""
    if wires.why_not():  # a user that may create network namespaces may also mount
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def failures(donor):
    """Checkpoints that could not be written."""
    return max((event["failed"] for event in donor.events("checkpoint")), default=0)


def test_a_full_disk_costs_checkpoints_but_not_the_run(tmp_path, nursery, small_disk):
    with Swarm(tmp_path / "run", checkpoint_every=1, nursery=nursery) as swarm:
        shutil.copy(swarm.folder / "tokenizer.json", small_disk)
        swarm.start("helper")
        donor = swarm.start("donor", wait=False, checkpoints=str(small_disk))
        trainer = swarm.start("trainer", wait=False, samples_per_s=32)
        donor.wait(lambda: list_checkpoints(small_disk, print), 60, "a checkpoint")
        filler = small_disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
        full_at = time.time()
        donor.wait(lambda: failures(donor) >= 2, 60, "checkpoints that cannot be written")
        failed = failures(donor)
        notice = donor.last("notice")["text"]
        before = list_checkpoints(small_disk, print)
        assert before
        for checkpoint in before:
            checkpoint.check()
        filler.unlink()
        freed_at = time.time()
        donor.wait(lambda: list_checkpoints(small_disk, print)[-1].step > before[-1].step, 60, "a checkpoint again")
        saved_s = time.time() - freed_at
        steps = sum(event["time"] > full_at for event in trainer.events("step"))
        tell_figures(
            "a full disk", failed=failed, notice=notice, steps_meanwhile=steps, saved_again_s=round(saved_s, 1)
        )
        assert "training goes on" in notice
        assert steps >= 2
