"""The folder of a small run without steps."""

import pytest
import torch

from dalle_lean import Dalle, save_model
from dalle_lean.tokenizer import Tokenizer
from tests.tiny import DALLE_FIELDS
from training.run.recipe import Recipe, ScheduleRecipe, load_recipe
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
def given_model(shards, tmp_path_factory):
    """A model folder for these shards, whose weights no run's seed produces."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer = Tokenizer.train(["a red heart", "a green tree"], 300)
    tokenizer.save(folder / "tokenizer.json")
    recipe = load_recipe("tiny")
    config = recipe.model_config(image_side=4, image_vocab_size=32, text_vocab_size=tokenizer.vocab_size)
    torch.manual_seed(123)
    save_model(Dalle(config), folder / "model", tokenizer=folder / "tokenizer.json", vqgan_fingerprint="a" * 64)
    return folder / "model"


@pytest.fixture
def running(hosted, request):
    """The module's hosted run; prints the output of its processes if a test fails."""
    before = request.session.testsfailed
    yield hosted
    if request.session.testsfailed > before:
        hosted.report()
