"""The folder of a small run that nobody has trained yet."""

import pytest

from tests.tiny import DALLE_FIELDS
from tests.training.conftest import write_shards
from training.run.recipe import Recipe, ScheduleRecipe
from training.swarm.config import SwarmSettings, write_settings

STEPS = 20


@pytest.fixture
def settings():
    return SwarmSettings(recipe=Recipe(model=DALLE_FIELDS, schedule=ScheduleRecipe(total_steps=STEPS, warmup_steps=0)))


@pytest.fixture
def run(tmp_path, settings):
    write_settings(tmp_path / "swarm.toml", settings)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards") / "train")
