"""What the commands that train on pictures do with their options."""

import dataclasses
import inspect

import pytest

from dalle_lean.images.vqgan import VQGANConfig
from training.clip.recipe import ClipRecipe
from training.clip.run import ClipRun
from training.commands.clip import train_clip
from training.commands.options import recipe_of
from training.commands.things import train_things
from training.commands.vqgan import train_vqgan
from training.run.progress import StepCount
from training.things.recipe import ThingRecipe
from training.things.run import ThingRun
from training.vqgan.recipe import VQGANRecipe
from training.vqgan.run import VQGANRun


@pytest.mark.parametrize(
    ("command", "run_class", "sections"),
    [
        (train_clip, ClipRun, [ClipRecipe]),
        (train_things, ThingRun, [ThingRecipe]),
        (train_vqgan, VQGANRun, [VQGANRecipe, VQGANConfig]),
    ],
)
def test_every_option_is_an_input_of_the_run_or_a_setting_of_its_recipe(command, run_class, sections):
    known = {"max_minutes", *inspect.signature(run_class).parameters}
    known |= {field.name for section in sections for field in dataclasses.fields(section)}
    assert inspect.signature(command).parameters.keys() <= known


@pytest.mark.parametrize(
    ("command", "run_class", "recipe_class"),
    [
        (train_clip, ClipRun, ClipRecipe),
        (train_things, ThingRun, ThingRecipe),
        (train_vqgan, VQGANRun, VQGANRecipe),
    ],
)
def test_a_commands_inputs_reach_its_run_and_its_time_includes_reading(
    command, run_class, recipe_class, tmp_path, monkeypatch, clock, capsys
):
    made = []

    class Stub:
        result = tmp_path / "out/result/config.json"

        def __init__(self, data, out, recipe, **inputs):
            made.append((data, out, recipe, inputs))
            clock.advance(90)

        def run(self, on_progress, limit):
            assert on_progress is made[0][-1].pop("on_progress")
            assert not limit.reached()
            clock.advance(31)
            assert limit.reached()
            return StepCount(step=2)

    monkeypatch.setattr(inspect.getmodule(run_class), run_class.__name__, Stub)
    inputs = {"heldout": tmp_path / "heldout", "device": "cpu"}
    command(tmp_path / "data", tmp_path / "out", steps=3, max_minutes=2, **inputs)
    [(data, out, recipe, reached)] = made
    assert (data, out) == (tmp_path / "data", tmp_path / "out")
    assert (type(recipe), recipe.steps) == (recipe_class, 3)
    assert inputs.items() <= reached.items()
    said = capsys.readouterr().out
    assert "the time is up" in said
    assert str(tmp_path / "out/result") in said


def test_a_recipe_has_the_options_of_its_names_and_what_replaces_them():
    options = {"steps": 7, "device": "cpu", "alike": ["paint,place"]}
    recipe = recipe_of(ClipRecipe, options, alike=(("paint", "place"),))
    assert recipe == ClipRecipe(steps=7, alike=(("paint", "place"),))
