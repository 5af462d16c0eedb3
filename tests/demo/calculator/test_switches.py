"""What the calculator's page switches: the plain way, the recipe's own, and what a model cannot have."""

import dataclasses
from pathlib import Path

import pytest

from dalle_lean.memory.published_models import PRESETS
from dalle_lean.memory.report import report_cost
from demo.calculator.page import LONGEST_RECIPE, add_recipe, show
from demo.calculator.switches import (
    PLAIN,
    Switches,
    activation_choices,
    default_switches,
    model_names,
    report_with,
    sharing_choices,
)
from training.run.recipe import recipe_names
from training.run.subjects import find_subject


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipes_own_switches_cost_what_the_recipe_costs(name):
    subject = find_subject(name)
    own = report_cost(subject, setup=subject.setup)
    switched = report_with(name, default_switches(name), 8.0)
    assert switched.cost == own.cost
    assert switched.setup == own.setup


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_model_opens_plain(name):
    assert default_switches(name) == PLAIN


@pytest.mark.parametrize("name", ["paper", "dalle-12b", "gpt2-large", "t5-large"])
@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bf16"},
        {"optimizer": "adamw8bit"},
        {"optimizer": "lamb8bit", "offload": True},
        {"activations": "checkpoint"},
        {"activations": "reversible"},
        {"sharing": "4"},
    ],
    ids=lambda change: ",".join(change),
)
def test_each_switch_makes_room_for_larger_batches(name, change):
    batch = 16
    switched = report_with(name, dataclasses.replace(PLAIN, **change), 100.0, batch=batch)
    plain = report_with(name, PLAIN, 100.0, batch=batch)
    assert switched.cost.peak_bytes < plain.cost.peak_bytes
    assert switched.largest_batch >= plain.largest_batch


def test_the_plain_way_shares_nothing_and_keeps_everything():
    plain = report_with("paper", PLAIN, 8.0)
    assert plain.priced.model.shared_blocks is None
    assert not plain.priced.model.reversible
    assert (plain.plan.activations, plain.plan.samples, plain.plan.loss_tokens) == ("keep", None, None)
    assert plain.setup.optimizer == "adamw"
    assert plain.cost.parameters > 8 * report_with("paper", default_switches("paper"), 8.0).cost.parameters


@pytest.mark.parametrize("name", model_names())
def test_every_offered_choice_has_a_price(name):
    for sharing in sharing_choices(name):
        for activations in activation_choices(name):
            switches = Switches(activations=activations, sharing=sharing)
            assert report_with(name, switches, 1.0, batch=1).cost.peak_bytes > 0


@pytest.mark.parametrize(
    ("name", "switches", "words"),
    [
        ("gpt2", Switches(offload=True), "only LAMB can be offloaded"),
        ("paper", Switches(precision="fp16"), "gradient scales need"),
        ("paper", Switches(precision="bf16-weights"), "only lamb keeps"),
    ],
)
def test_what_cannot_be_is_said_without_figures(name, switches, words):
    said, *figures = show(name, 8, 1, 128, *dataclasses.astuple(switches))
    assert words in said
    assert figures == [None, "", ""]


GPU, BATCH = "“GPU memory, GB” must be a number from 1 to 10000", "“Batch” must be a whole number from 1 to 1000000"
TOKENS = "“Tokens per sample” must be a whole number from 1 to"


@pytest.mark.parametrize("wrong", [None, 0, -1, 1e30, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "place", "words"),
    [("gpt2", 0, GPU), ("gpt2", 1, BATCH), ("gpt2", 2, f"{TOKENS} 1024"), ("t5-large", 2, f"{TOKENS} 1000000")],
)
def test_a_number_that_does_not_fit_its_field_is_named_by_the_fields_label(name, place, words, wrong):
    numbers = [8, 1, 128]
    numbers[place] = wrong
    said, *figures = show(name, *numbers, *dataclasses.astuple(PLAIN))
    assert said == f"**Not possible:** {words}"
    assert figures == [None, "", ""]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "[model] is missing or empty"),
        ("paper", "it is not TOML"),
        ("/etc/passwd", "it is not TOML"),
        ("[model]\nnum_layers = 1000000000", "num_layers=1000000000"),
        ("[modle]\n", "unknown section [modle]"),
        ("[model]\nnum_layers = 8\n#" + "x" * LONGEST_RECIPE, f"the limit is {LONGEST_RECIPE:,}"),
        ("a = " + "[" * 9000, "it is nested too deep"),
    ],
)
def test_a_visitors_recipe_is_read_as_text_alone_and_with_limits(text, words):
    *_, said, bars, kinds, holds = add_recipe(text, 8.0)
    assert said.startswith("**Not possible:**")
    assert words in said
    assert (bars, kinds, holds) == (None, "", "")


def test_a_visitors_recipe_costs_what_the_same_file_costs():
    path = "tests/demo/calculator/mine.toml"
    theirs, ours = (find_subject(source) for source in (Path(path).read_text(), path))
    assert (theirs.name, ours.name) == ("your recipe", "mine")
    assert theirs == dataclasses.replace(ours, name=theirs.name)


def test_tokens_count_for_published_models_and_are_fixed_in_a_dall_e():
    long, short = (show("gpt2", 8, 1, tokens, *dataclasses.astuple(PLAIN))[0] for tokens in (1024, 256))
    assert "1024 tokens" in long
    assert "256 tokens" in short
    assert "1280 tokens" in show("paper", 8, 1, 256, *dataclasses.astuple(PLAIN))[0]


def test_the_bars_add_up_to_what_is_said():
    said, bars, kinds, holds = show("gpt2-large", 11, 2, 1024, *dataclasses.astuple(Switches(precision="bf16")))
    plain = report_with("gpt2-large", PLAIN, 11.0, batch=2)
    sums = bars.groupby("where")["GB"].sum()
    assert sums["plain"] == pytest.approx(plain.cost.peak_bytes / 1e9)
    assert "optimizer state" in kinds
    assert all(name in holds for name in (*PRESETS, "paper"))
    assert "11 GB" in said
