"""SwarmLamb is LAMB after clipping."""

import copy
import math

import pytest
import torch

from dalle_lean.optim.lamb import Lamb
from training.swarm.optimizer.checked_step import SwarmLamb

SETTINGS = {"lr": 0.01, "min_eight_bit_numel": 64, "block_size": 32}


@pytest.fixture
def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((16, 8), (8,))]


def set_gradients(parameters, size, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("size", [0.01, 100.0], ids=["short gradients", "clipped gradients"])
def test_it_is_lamb_after_clipping(parameters, size):
    twins = copy.deepcopy(parameters)
    lamb, twin = SwarmLamb(parameters, clip_norm=4.0, **SETTINGS), Lamb(twins, **SETTINGS)
    for step in range(5):
        set_gradients(parameters, size, step)
        lamb.step()
        set_gradients(twins, size, step)
        torch.nn.utils.clip_grad_norm_(twins, 4.0)
        twin.step()
    for parameter, expected in zip(parameters, twins, strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_a_number_that_is_not_finite_is_counted_and_changes_nothing(parameters, bad):
    lamb = SwarmLamb(parameters, clip_norm=4.0, **SETTINGS)
    set_gradients(parameters, 1.0, 0)
    lamb.step()
    before = copy.deepcopy([parameters, lamb.state_dict()["state"]])
    set_gradients(parameters, 1.0, 1)
    parameters[1].grad[3] = bad
    lamb.step()
    assert lamb.skipped_steps == 1
    torch.testing.assert_close([parameters, lamb.state_dict()["state"]], before, rtol=0, atol=0)


def test_a_step_that_is_held_changes_nothing(parameters):
    lamb = SwarmLamb(parameters, clip_norm=4.0, **SETTINGS)
    set_gradients(parameters, 1.0, 0)
    before = copy.deepcopy([parameters, lamb.state_dict()["state"]])
    lamb.held = True
    lamb.step()
    torch.testing.assert_close([parameters, lamb.state_dict()["state"]], before, rtol=0, atol=0)


def test_what_its_state_is_made_of_is_known_before_the_first_step(parameters):
    def shapes():
        states = (lamb.state[parameter].items() for parameter in parameters)
        return [{name: value.shape for name, value in state if torch.is_tensor(value)} for state in states]

    lamb = SwarmLamb(parameters, clip_norm=4.0, **SETTINGS)
    before = shapes()
    set_gradients(parameters, 1.0, 0)
    lamb.step()
    assert shapes() == before


def test_what_ends_a_step_in_the_background_is_kept(parameters):
    lamb = SwarmLamb(parameters, clip_norm=4.0, **SETTINGS)
    set_gradients(parameters, 1.0, 0)
    with torch.no_grad():
        parameters[0][0, 0] = math.nan
    with pytest.raises(ValueError, match="16, 8"):
        lamb.step()
    assert isinstance(lamb.failure, ValueError)
