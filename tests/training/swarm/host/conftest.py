"""The folder of a small run that nobody has trained yet."""

import pytest

from tests.tiny import DALLE_FIELDS
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
