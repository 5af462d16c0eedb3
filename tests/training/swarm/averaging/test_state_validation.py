"""A complete and finite state may still be worthless."""

import pytest
import torch

from tests.training.swarm.harness import TIMING, Swarm
from training.data.loader import Batch
from training.step.gradients import GradientComputer
from training.swarm.averaging.state_validation import StateRefused, check_near, validate_state
from training.swarm.peer.gradient_worker import build_model


@pytest.fixture
def judged(tmp_path, nursery):
    """A tiny model's GradientComputer, and held-out samples."""
    settings = Swarm(tmp_path, nursery=nursery).settings
    model, config = build_model(settings), settings.recipe.model
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(config["image_vocab_size"], (8, config["image_side"] ** 2), generator=generator)
    texts = torch.randint(config["text_vocab_size"], (8, config["text_len"]), generator=generator)
    return GradientComputer(model, settings.recipe.memory, micro_batch_size=4), Batch(texts, codes)


def test_parameters_as_good_as_the_present_ones_are_taken(judged):
    gradients, heldout = judged
    own = list(gradients.model.parameters())
    validate_state(gradients, heldout, own, [parameter.detach() + 1e-4 for parameter in own])


def test_ruined_parameters_are_refused_and_the_present_ones_stay(judged):
    gradients, heldout = judged
    own = list(gradients.model.parameters())
    before = [parameter.detach().clone() for parameter in own]
    with pytest.raises(StateRefused, match="held-out loss"):
        validate_state(gradients, heldout, own, [torch.randn_like(parameter) for parameter in own])
    assert all(torch.equal(now, then) for now, then in zip(own, before, strict=True))


def test_any_parameters_are_better_than_those_that_are_not_finite(judged):
    gradients, heldout = judged
    own = list(gradients.model.parameters())
    offered = [parameter.detach().clone() for parameter in own]
    with torch.no_grad():
        own[0].fill_(torch.nan)
    validate_state(gradients, heldout, own, offered)


def test_near_is_measured_over_all_parameters_together():
    own = [torch.full((4,), 2.0), torch.zeros(3)]
    check_near(own, [torch.full((4,), 2.1), torch.full((3,), 0.1)], 0.1)
    for far in ([torch.full((4,), 2.3), torch.zeros(3)], [torch.full((4,), 2.0), torch.full((3,), torch.inf)]):
        with pytest.raises(StateRefused, match=r"more than 0\.1 of their norm"):
            check_near(own, far, 0.1)


@pytest.mark.slow
@pytest.mark.swarm
def test_a_newcomer_refuses_a_ruined_state(tmp_path, nursery):
    with Swarm(tmp_path, timing=TIMING, nursery=nursery, batch_size=32) as swarm:
        swarm.start("helper")
        hostile = swarm.start("trainer", samples_per_s=16.0, misbehaviour="ruined_state")
        hostile.wait_for_step(3)
        newcomer = swarm.start("trainer", samples_per_s=16.0)
        assert "held-out loss" in newcomer.wait_for_event("refused", 60)["reason"]
        assert not newcomer.events("adopted")
