"""Inner steps between two steps of the swarm."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest
import torch

from tests.training.swarm.harness import TIMING, Swarm, batches_of
from training.step.learner import Learner
from training.swarm.config import WireSection
from training.swarm.optimizer.diloco import OuterSGD, PseudoGradientAverager
from training.swarm.peer.gradient_worker import GradientWorker


@pytest.fixture
def ways():
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator) for shape in ((3, 4), (5,))] for _ in range(4)]


def test_the_outer_step_is_nesterovs(ways):
    parameters = [torch.nn.Parameter(way.clone()) for way in ways[0]]
    expected = [parameter.detach().clone() for parameter in parameters]
    velocity = [torch.zeros_like(parameter) for parameter in parameters]
    outer = OuterSGD([{"params": parameters, "weight_decay": 0.1}], lr=0.7, momentum=0.9)
    for of_step in ways[1:]:
        for place, way in enumerate(of_step):
            parameters[place].grad = way.clone()
            velocity[place] = 0.9 * velocity[place] + way
            expected[place] -= 0.7 * (way + 0.9 * velocity[place])
        outer.step()
    for parameter, value in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_outer_step_that_is_not_finite_is_counted_and_not_taken(ways, bad):
    parameters = [torch.nn.Parameter(way.clone()) for way in ways[0]]
    outer = OuterSGD([{"params": parameters}], lr=0.7, momentum=0.9)
    for parameter, way in zip(parameters, ways[1], strict=True):
        parameter.grad = way.clone()
    parameters[1].grad[2] = bad
    outer.step()
    assert outer.skipped_steps == 1
    assert all(torch.equal(parameter, way) for parameter, way in zip(parameters, ways[0], strict=True))
    assert not any(state["momentum_buffer"].any() for state in outer.state.values())


def test_what_is_averaged_is_the_way_from_the_agreed_weights(ways):
    own = [torch.nn.Parameter(way.clone()) for way in ways[0]]
    averager = PseudoGradientAverager(own, dht=None, prefix="test", client_mode=True, start=False)
    averager.shared = ways[1]
    averager.accumulate_grads_(4)
    averager.accumulate_grads_(0)
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as averaged:
        for way, agreed, parameter in zip(averaged, averager.shared, own, strict=True):
            assert torch.equal(way, agreed - parameter)
    assert averager.local_samples_accumulated == 4
    averager.reset_accumulated_grads_()
    assert averager.local_samples_accumulated == 0
    assert all(torch.equal(parameter, way) for parameter, way in zip(own, ways[0], strict=True))


def flat(worker):
    """All parameters in the order of the averagers."""
    groups = worker.gradients.optimizer.param_groups
    return torch.cat([parameter.detach().flatten() for group in groups for parameter in group["params"]]).numpy()


@pytest.mark.long
@pytest.mark.swarm
def test_one_peer_whose_outer_step_goes_the_whole_way_learns_as_without_a_swarm(tmp_path, nursery):
    wire = WireSection(mode="diloco", compression="fp32", delayed=False, inner_steps=5, outer_lr=1.0, outer_momentum=0)
    with Swarm(tmp_path, wire=wire, nursery=nursery, batch_size=8) as swarm:
        peer = swarm.start("trainer", batch_size=8, samples_per_s=40.0)
        peer.wait_for_step(3)
        settings = swarm.settings
        memory = dataclasses.replace(settings.recipe.memory, micro_batches=1)
        alone = GradientWorker(settings, batch_size=8, memory=memory)
        assert isinstance(alone.gradients, Learner)
        steps = [event["samples"] // 8 for event in peer.events("step") if 0 < event["epoch"] <= 3]
        batches, taken = batches_of(settings, tmp_path, peer.last("here")["peer"], 8), 0
        for epoch, until in enumerate(steps):
            for place in range(until - taken):
                alone.learn_from(next(batches), 5 * epoch + min(place, 4) + 1)
            taken = until
            np.testing.assert_allclose(peer.parameters(epoch + 1), flat(alone), rtol=0, atol=1e-5)
        assert np.abs(peer.parameters(3) - peer.parameters(1)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.swarm
def test_peers_that_go_their_own_ways_agree_after_each_step_of_the_swarm(tmp_path, nursery):
    wire = WireSection(mode="diloco", min_eight_bit_numel=256, delayed=False, inner_steps=6)
    with Swarm(tmp_path, wire=wire, timing=TIMING, nursery=nursery, batch_size=16) as swarm:
        swarm.start("helper")
        trainers = [swarm.start("trainer", samples_per_s=10.0, wait=False) for _ in range(2)]
        swarm.wait_for_common_step(trainers, 2, timeout_s=120)
        step = max(set.intersection(*(member.steps_kept() for member in trainers)))
        difference = np.abs(trainers[0].parameters(step) - trainers[1].parameters(step)).max()
        moved = np.abs(trainers[0].parameters(step) - trainers[0].parameters(1)).max()
        if os.environ.get("SWARM_FIGURES"):
            print(json.dumps({"step": step, "difference": float(difference), "moved": float(moved)}))
        assert difference < 0.2 * moved
        assert trainers[0].last("step")["dropped_batches"] == 0
