"""Peers on loopback learn what one machine would learn from all their batches."""

import dataclasses

import numpy as np
import pytest
import torch

from dalle_lean.optim.lamb import Lamb
from dalle_lean.optim.parameter_groups import parameter_groups
from dalle_lean.tokenizer import Tokenizer
from tests.training.swarm.harness import TIMING, Swarm, wait_for
from training.data.catalog import find_shards
from training.data.loader import TrainingData
from training.run.rates import learning_rate
from training.run.recipe import LAMB_ONLY
from training.step.gradients import GradientComputer
from training.swarm.config import WireSection, write_settings
from training.swarm.peer.gradient_worker import build_model

STEPS = 3
EXACT = WireSection(compression="fp32", delayed=False)


def await_peers(swarm, count):
    """Set min_peers."""
    section = dataclasses.replace(swarm.settings.swarm, min_peers=count)
    swarm.settings = dataclasses.replace(swarm.settings, swarm=section)
    write_settings(swarm.folder / "swarm.toml", swarm.settings)


def batches_by_step(swarm, member, batch_size):
    """The batches that a trainer has learnt from in each of the first steps."""
    settings, shards = swarm.settings, find_shards(swarm.settings.swarm.data)
    data = TrainingData(shards, settings.recipe.data, identity=member.last("here")["peer"])
    tokenizer = Tokenizer.from_file(swarm.folder / "tokenizer.json")
    stream = data.batches(batch_size, tokenizer, settings.recipe.model["text_len"])
    counts = np.diff([0, *(event["samples"] for event in member.events("step") if 0 < event["epoch"] <= STEPS)])
    return [[next(stream)[0] for _ in range(count // batch_size)] for count in counts]


def learn_alone(settings, batches):
    """The parameters after each step of plain LAMB on these lists of batches, flat."""
    model, recipe, schedule = build_model(settings), settings.recipe.optimizer, settings.recipe.schedule
    groups = parameter_groups(model, recipe.weight_decay)
    chosen = {name: getattr(recipe, name) for name in LAMB_ONLY}
    lamb = Lamb(groups, lr=0.0, betas=recipe.betas, eps=recipe.eps, **chosen)
    gradients = GradientComputer(model, settings.recipe.memory, micro_batch_size=64)
    parameters = [parameter for group in lamb.param_groups for parameter in group["params"]]
    after = []
    for number, of_step in enumerate(batches, start=1):
        lamb.zero_grad()
        samples = sum(len(batch.text_ids) for batch in of_step)
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for batch in of_step:
            lamb.zero_grad()
            gradients.accumulate_gradient(batch)
            for total, parameter in zip(sums, parameters, strict=True):
                total += parameter.grad * (len(batch.text_ids) / samples)
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total
        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
        for group in lamb.param_groups:
            group["lr"] = learning_rate(
                number, peak=schedule.peak_lr, warmup_steps=schedule.warmup_steps, total_steps=schedule.total_steps
            )
        lamb.step()
        after.append(torch.cat([parameter.detach().flatten() for parameter in parameters]).numpy())
    return after


def undisturbed(trainer):
    """Whether it has taken every step with the others; a busy machine may prevent that."""
    done = trainer.last("step")
    whole = "% results" not in trainer.log  # hivemind logs this if parts of an average are missing
    return whole and done["solo_steps"] == done["resyncs"] == done["dropped_tensors"] == 0


@pytest.mark.slow
@pytest.mark.swarm
def test_two_peers_with_batches_of_two_sizes_learn_as_one_machine_would_from_all_of_them(tmp_path, nursery):
    timing = dataclasses.replace(TIMING, averaging_timeout_s=30.0, next_chunk_timeout_s=10.0)
    for attempt in "abc":
        with Swarm(tmp_path / attempt, wire=EXACT, timing=timing, batch_size=144, nursery=nursery) as swarm:
            await_peers(swarm, 2)
            swarm.start("helper")
            sizes = (4, 6)
            trainers = [swarm.start("trainer", batch_size=size, samples_per_s=24.0, wait=False) for size in sizes]
            swarm.wait_for_common_step(trainers, STEPS, timeout_s=120)
        if all(undisturbed(trainer) for trainer in trainers):
            break
    assert all(undisturbed(trainer) for trainer in trainers)
    parts = [batches_by_step(swarm, trainer, size) for trainer, size in zip(trainers, sizes, strict=True)]
    expected = learn_alone(swarm.settings, [one + other for one, other in zip(*parts, strict=True)])
    for step in range(1, STEPS + 1):
        for trainer in trainers:
            np.testing.assert_allclose(trainer.parameters(step), expected[step - 1], rtol=0, atol=1e-5)
    assert np.abs(expected[-1] - expected[0]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.swarm
def test_a_swarm_of_one_learns_and_a_second_peer_goes_on_with_it(tmp_path, nursery):
    with Swarm(tmp_path, wire=EXACT, nursery=nursery, batch_size=32) as swarm:
        first = swarm.start("trainer", samples_per_s=16.0)
        first.wait_for_step(2)
        swarm.addresses.append(first.last("here")["addresses"][0])
        second = swarm.start("trainer", samples_per_s=16.0)
        joined = second.wait_for_event("adopted")["epoch"]
        assert joined >= 2
        assert "the swarm at" in second.events("notice")[0]["text"]

        def agree():
            step = max(first.steps_kept() & second.steps_kept(), default=0)
            return step > joined and np.allclose(first.parameters(step), second.parameters(step), rtol=0, atol=1e-5)

        second.wait(agree, 60, "agreeing")


@pytest.mark.slow
@pytest.mark.swarm
def test_nobody_begins_before_enough_trainers_are_there(tmp_path, nursery):
    with Swarm(tmp_path, wire=EXACT, nursery=nursery, batch_size=32) as swarm:
        await_peers(swarm, 2)
        first = swarm.start("trainer", samples_per_s=16.0)
        swarm.addresses.append(first.last("here")["addresses"][0])
        notice = first.wait_for_event("notice")["text"]
        assert notice == "1 of 2 trainers are here; waiting for 1 more"
        assert not first.events("step")
        second = swarm.start("trainer", samples_per_s=16.0)
        swarm.wait_for_common_step([first, second], 1)
        assert first.events("step")[0]["time"] > second.last("here")["time"]


@pytest.mark.swarm
def test_a_trainer_that_waits_for_others_leaves_at_ctrl_c(tmp_path, nursery):
    with Swarm(tmp_path, wire=EXACT, nursery=nursery) as swarm:
        await_peers(swarm, 2)
        first = swarm.start("trainer")
        first.wait_for_event("notice")
        first.interrupt()
        first.wait(lambda: not first.alive or first.events("left"), 20, "leaving")
        assert first.events("left")
        assert not first.events("step")


@pytest.mark.slow
@pytest.mark.swarm
def test_who_cannot_get_the_state_says_how_far_behind_it_is_and_gives_up(tmp_path, nursery):
    timing = dataclasses.replace(TIMING, load_state_attempts=2)
    with Swarm(tmp_path, wire=EXACT, timing=timing, nursery=nursery, batch_size=32) as swarm:
        swarm.start("helper")
        clients = [swarm.start("trainer", samples_per_s=16.0, client_mode=True)]  # serves no state
        swarm.wait_for_common_step(clients, 3)
        late = swarm.start("trainer", samples_per_s=16.0)
        failed = late.wait_for_event("failed")["error"]
        assert "OutOfSync: this peer is at step 0, the swarm at" in failed
        assert "in 2 attempts" in failed


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.parametrize("rank", [0, 2, 1000], ids=["whole gradients", "PowerSGD", "PowerSGD of too high a rank"])
def test_a_donor_that_brings_nothing_goes_every_step_with_its_only_client(tmp_path, nursery, rank):
    wire = dataclasses.replace(EXACT, power_sgd_rank=rank)
    with Swarm(tmp_path, wire=wire, nursery=nursery, batch_size=48) as swarm:
        donor = swarm.start("donor")
        swarm.addresses.append(donor.last("here")["addresses"][0])
        client = swarm.start("trainer", samples_per_s=24.0, client_mode=True)
        swarm.wait_for_common_step([donor, client], 3, timeout_s=120)
        for step in (2, 3):
            np.testing.assert_allclose(donor.parameters(step), client.parameters(step), rtol=0, atol=1e-5)
        assert np.abs(donor.parameters(3) - donor.parameters(2)).max() > 1e-3
        assert client.last("step")["solo_steps"] == client.last("step")["dropped_tensors"] == 0


@pytest.mark.slow
@pytest.mark.swarm
def test_a_donor_that_missed_the_last_step_gets_it_from_a_trainer_that_stays(tmp_path, nursery):
    with Swarm(tmp_path, wire=EXACT, nursery=nursery, batch_size=64, total_steps=3, warmup_steps=1) as swarm:
        swarm.name_host("donor1")
        donor = swarm.start("donor", checkpoints=str(tmp_path), judges=True)
        swarm.addresses.append(donor.last("here")["addresses"][0])
        trainer = swarm.start("trainer", samples_per_s=16.0)
        donor.wait_for_step(2)
        donor.freeze()
        trainer.wait(
            lambda: any("staying" in notice["text"] for notice in trainer.events("notice")), 60, "the last step"
        )
        donor.thaw()
        wait_for(lambda: donor.events("left") and trainer.events("left"), 90, "the end of the run")
        assert any("fetched the state of the last step" in notice["text"] for notice in donor.events("notice"))
        np.testing.assert_array_equal(donor.parameters(3), trainer.parameters(3))
