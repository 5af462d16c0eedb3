import dataclasses
import sys

import pytest
import torch

from dalle_lean import Dalle, DalleConfig, MemoryPlan
from dalle_lean.errors import UserError
from dalle_lean.require import MissingPackage
from training.run.recipe import OptimizerRecipe, Recipe, load_recipe, recipe_names
from training.run.subjects import find_subject
from training.step.learner import build_optimizer


@pytest.mark.parametrize("name", recipe_names())
def test_each_shipped_recipe_parses_and_survives_its_own_form(name):
    recipe = load_recipe(name)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_the_paper_recipe_is_the_papers_run():
    recipe = load_recipe("paper")
    config = recipe.model_config(image_side=32, image_vocab_size=8192, text_vocab_size=32100)
    assert config == DalleConfig.paper()
    assert recipe.data.batch_size == 4096
    assert (recipe.optimizer.name, recipe.optimizer.betas, recipe.optimizer.eps) == ("lamb", (0.9, 0.96), 1e-6)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.clip_norm) == (0.045, 4)
    assert (recipe.schedule.peak_lr, recipe.schedule.warmup_steps, recipe.schedule.total_steps) == (2.5e-3, 3125, 31250)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optimiser": {}}, r"\[optimiser\]"),
        ({"optimizer": {"learning_rate": 1.0}}, r"\[optimizer\] learning_rate: unknown key"),
        ({"model": {"depth": 12}}, "depth"),
        ({"model": {"num_layers": 0}}, "num_layers=0"),
        ({"data": {"batch_size": "many"}}, r"\[data\] batch_size = 'many'"),
        ({"data": {"batch_size": True}}, r"\[data\] batch_size = True"),
        ({"data": {"heldout_share": 1.5}}, r"heldout_share = 1.5"),
        ({"data": {"caption_dropout": 1.5}}, r"caption_dropout = 1.5: must be a finite number in 0\.\.1"),
        ({"data": {"caption_dropout": float("nan")}}, "caption_dropout = nan"),
        ({"memory": {"precision": "fp8"}}, "precision = 'fp8'"),
        ({"memory": {"activations": "none"}}, "activations = 'none'"),
        ({"memory": {"activations": "selective"}}, "a reversible model takes keep, reversible"),
        ({"memory": {"samples": -1}}, "samples = -1"),
        ({"memory": {"samples": False}}, "samples = False"),
        ({"memory": {"residual_dtype": "float16"}}, "residual_dtype = 'float16'"),
        ({"memory": {"precision": "fp16", "activations": "keep"}}, "'fp16' with activations = 'keep'"),
        (
            {"memory": {"precision": "bf16-weights"}, "optimizer": {"name": "adamw"}},
            "'bf16-weights' with optimizer 'ad",
        ),
        ({"optimizer": {"delayed": True}}, r"\[optimizer\] delayed = True: this option is gone; leave it out"),
        ({"schedule": {"length_warmup": [[10, 4]]}}, "length_warmup = "),
        ({"schedule": {"length_warmup": [[20, 4, 2], [10, 8, 4]]}}, r"the steps \[20, 10\]"),
        ({"schedule": {"warmup_steps": 1, "total_steps": 5, "length_warmup": [[6, 4, 2]]}}, r"within 1\.\.5"),
        ({"optimizer": {"name": "sgd"}}, "name = 'sgd'"),
        ({"optimizer": {"betas": [0.9]}}, "betas"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "betas"),
        ({"optimizer": {"eps": float("nan")}}, "eps = nan"),
        ({"optimizer": {"block_size": 0}}, "block_size = 0"),
        ({"optimizer": {"min_eight_bit_numel": -1}}, "min_eight_bit_numel = -1"),
        ({"optimizer": {"clip_norm": 0.0}}, "clip_norm = 0.0"),
        ({"optimizer": {"clamp_weight_norm": 0.0}}, "clamp_weight_norm = 0.0"),
        ({"optimizer": {"name": "adamw", "block_size": 256}}, "block_size: adamw has no such setting"),
        ({"schedule": {"warmup_steps": 10, "total_steps": 5}}, "warmup_steps = 10"),
        ({"data": {"batch_size": 10}, "memory": {"micro_batches": 4}}, "batch_size = 10"),
        ({"data": 3}, "data = 3"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(sections, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(sections)


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_a_recipe_of_an_earlier_program_without_the_delayed_step_is_read(name):
    assert Recipe.from_dict({"optimizer": {"name": name, "delayed": False}}).optimizer == OptimizerRecipe(name=name)


def test_a_missing_recipe_names_those_there_are(tmp_path):
    with pytest.raises(ValueError, match="emoji64"):
        load_recipe("no-such-recipe")
    with pytest.raises(UserError, match=r"no recipe 'emoj128' \(did you mean emoji128\?\): it is neither"):
        load_recipe("emoj128")
    with pytest.raises(UserError, match=r"no model 'tinny' \(did you mean tiny\?\): it is neither"):
        find_subject("tinny")
    (tmp_path / "mine.toml").write_text("[data\n")
    with pytest.raises(ValueError, match=r"mine\.toml"):
        load_recipe(tmp_path / "mine.toml")


@pytest.mark.parametrize("text", ["", "[model]\n", "[data]\nbatch_size = 8\n"])
def test_a_file_that_names_no_model_asks_for_the_recipes_name(tmp_path, text):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=r"mine\.toml: its \[model\] is missing or empty.*name the recipe paper"):
        load_recipe(tmp_path / "mine.toml")
    assert load_recipe(tmp_path / "mine.toml", needs_model=False).model == {}


def test_options_override_the_recipe_and_the_warm_up_keeps_its_share():
    recipe = load_recipe("paper").override(steps=1000, batch_size=512, lr=1.0, seed=7, precision="fp32")
    assert (recipe.schedule.total_steps, recipe.schedule.warmup_steps, recipe.schedule.peak_lr) == (1000, 100, 1.0)
    assert (recipe.data.batch_size, recipe.data.seed, recipe.memory.precision) == (512, 7, "fp32")
    assert load_recipe("paper").override() == load_recipe("paper")


def test_stages_of_length_keep_their_share_and_vanish_where_no_step_is_left_for_them():
    stages = [[10, 4, 2], [400, 8, 4]]
    recipe = Recipe.from_dict({"schedule": {"warmup_steps": 0, "total_steps": 800, "length_warmup": stages}})
    assert recipe.override(steps=80).schedule.length_warmup == ((1, 4, 2), (40, 8, 4))
    assert recipe.override(steps=8).schedule.length_warmup == ((4, 8, 4),)


@pytest.mark.parametrize("stage", [(5, 9, 4), (5, 0, 4), (5, 8, 5), (5, 8, 0)])
def test_a_stage_of_length_that_the_model_does_not_have_is_refused(stage):
    recipe = Recipe.from_dict({"model": {"text_len": 8}, "schedule": {"length_warmup": [list(stage)]}})
    with pytest.raises(ValueError, match=r"length_warmup = .* text_len in 1\.\.8 and image_side in 1\.\.4"):
        recipe.model_config(image_side=4, image_vocab_size=8, text_vocab_size=300)


def test_every_field_of_a_memory_plan_can_be_set_and_zero_is_the_whole():
    chosen = {
        "activations": "checkpoint",
        "samples": 2,
        "attention_heads": 1,
        "feed_forward_tokens": 16,
        "loss_tokens": 32,
        "grads_in_place": False,
        "residual_dtype": "bfloat16",
        "fused_attention": True,
        "offload_optimizer": False,
        "master_weights": False,
    }
    assert set(chosen) == {field.name for field in dataclasses.fields(MemoryPlan)}
    memory = Recipe.from_dict({"model": {"reversible": False}, "memory": chosen}).memory
    assert {name: getattr(memory, name) for name in chosen} == chosen

    none = {"activations": "", "samples": 0, "loss_tokens": 0, "residual_dtype": ""}
    memory = Recipe.from_dict({"memory": none}).memory
    assert [getattr(memory, name) for name in none] == [None] * 4


def test_a_model_that_does_not_fit_the_data_is_refused():
    recipe = Recipe(model={"image_side": 8})
    sizes = {"image_side": 8, "image_vocab_size": 64, "text_vocab_size": 300}
    assert recipe.model_config(**sizes).text_vocab_size == 300
    with pytest.raises(ValueError, match="image_side = 8, but the data has 16"):
        recipe.model_config(**{**sizes, "image_side": 16})


@pytest.mark.parametrize("name", ["lamb", "adamw", "adamw8bit"])
def test_the_recipe_names_the_optimizer(name):
    recipe = load_recipe("tiny")
    model = Dalle(recipe.model_config(image_side=2, image_vocab_size=8, text_vocab_size=300))
    optimizer = build_optimizer(model, Recipe.from_dict({"optimizer": {"name": name}}).optimizer, recipe.memory)
    assert type(optimizer).__name__.lower() == name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.045, 0.0]


def test_a_missing_bitsandbytes_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingPackage, match=r"bitsandbytes is not installed; install it with: pip install .*training"):
        build_optimizer(torch.nn.Linear(3, 1), OptimizerRecipe(name="adamw8bit"), MemoryPlan())
