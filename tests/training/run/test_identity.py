"""What a command that differs from its run is told: the settings that differ, and what to do."""

import dataclasses
import json
import logging
import re

import pytest
import torch

from dalle_lean.errors import UserError
from tests.training.runs import Killed, at_step, kill
from training.run.checkpoint import NAME as CHECKPOINT
from training.run.recipe import load_recipe
from training.trainer import train


@pytest.fixture(scope="module")
def finished(shards, tmp_path_factory):
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("finished")
    train(shards, out, load_recipe("tiny"))
    return out


def test_a_schedule_that_leaves_nothing_to_do_is_refused(shards, recipe, finished, tmp_path):
    with pytest.raises(Killed):
        train(shards, tmp_path, recipe.override(steps=200), on_progress=at_step(16, kill))
    with pytest.raises(UserError, match=r"at step 15, and this command asks for 12 \(--steps was 200, now 12\): give"):
        train(shards, tmp_path, recipe)
    with pytest.raises(UserError, match=r"run at step 12, .* asks for 12 \(--lr was .*, now 0\.5\): .* --init .*model"):
        train(shards, finished, recipe.override(lr=0.5))


def test_more_steps_and_another_rate_are_gone_on_with_and_said(shards, recipe, tmp_path, caplog):
    train(shards, tmp_path, recipe)
    with caplog.at_level(logging.INFO, "training"):
        assert train(shards, tmp_path, recipe.override(steps=14, lr=0.5)).step == 14
    assert re.search(
        r"From step 12 on with another schedule: --steps was 12, now 14, --lr was .*, now 0\.5", caplog.text
    )


def test_a_run_of_an_earlier_program_is_never_called_finished_beyond_its_end(shards, recipe, tmp_path):
    train(shards, tmp_path, recipe)
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    run = json.loads(state["run"])
    del run["schedule"]
    torch.save({**state, "run": json.dumps(run)}, tmp_path / CHECKPOINT)
    assert train(shards, tmp_path, recipe).step == 12
    with pytest.raises(UserError, match="holds a run at step 12, and this command asks for 5: give more --steps"):
        train(shards, tmp_path, recipe.override(steps=5))


def test_a_forgotten_recipe_is_said_by_the_settings_that_differ(shards, recipe, finished):
    other = load_recipe("emoji64")
    model = {**other.model, "hidden_size": 128, "num_layers": 2}
    other = dataclasses.replace(other, model={key: model[key] for key in model if "image" not in key})
    with pytest.raises(UserError, match=r"holds another run \([a-z_]+ was ") as refused:
        train(shards, finished, other)
    assert re.search(r"; and \d+ more\): give the --config, options and data", str(refused.value))
    assert "{" not in str(refused.value)
