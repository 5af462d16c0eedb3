"""Runs that an earlier version of the program began, killed after step 3 of 6, are continued by this one.

To keep their checkpoints small all but train's hold the same number in each weight, and optimizers without statistics.
"""

import json
import math
import shutil
from pathlib import Path

import pytest

from dalle_lean.images.vqgan import VQGANConfig
from tests.training.picture_runs import train_on_pictures
from tests.training.runs import losses
from training.clip.recipe import ClipRecipe
from training.clip.run import ClipRun
from training.run.metrics import read_metrics
from training.run.recipe import Recipe
from training.things.recipe import ThingRecipe
from training.things.run import ThingRun
from training.trainer import train
from training.vqgan.recipe import VQGANRecipe
from training.vqgan.run import VQGANRun

EARLIER = Path(__file__).parent / "earlier_runs"
RECIPES = {"train-vqgan": VQGANRecipe, "train-clip": ClipRecipe, "train-things": ThingRecipe}
RUNS = {"train-vqgan": VQGANRun, "train-clip": ClipRun, "train-things": ThingRun}


def tupled(value):
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def recipe_of(word):
    fields = {name: tupled(value) for name, value in json.loads((EARLIER / word / "recipe.json").read_text()).items()}
    if "config" in fields:
        fields["config"] = VQGANConfig(**{name: tupled(value) for name, value in fields["config"].items()})
    return RECIPES[word](**fields)


def copy_of(word, folder):
    out = folder / word
    shutil.copytree(EARLIER / word, out)
    return out


def test_an_earlier_run_of_train_goes_on_as_it_did_there(tmp_path):
    recipe = Recipe.from_dict(json.loads((EARLIER / "train/recipe.json").read_text()))
    out = copy_of("train", tmp_path)
    assert train(EARLIER / "shards", out, recipe).step == 6
    whole = {line["step"]: line["loss"] for line in read_metrics(out / "whole.jsonl") if "loss" in line}
    assert losses(out) == pytest.approx(whole, rel=1e-3)
    assert (out / "model/model.safetensors").exists()


@pytest.mark.parametrize("word", RUNS)
def test_an_earlier_run_on_pictures_goes_on_from_its_checkpoint(word, tmp_path):
    out = copy_of(word, tmp_path)
    notes = []
    progress = {"on_progress": lambda *at: notes.append(at[2])}
    end = train_on_pictures(RUNS[word], EARLIER / "pictures", out, recipe_of(word), **progress)
    assert not any(note.startswith(("step 1/", "step 2/")) for note in notes)
    assert end.step == 6
    assert math.isfinite(end.loss)
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4, 5, 6]
