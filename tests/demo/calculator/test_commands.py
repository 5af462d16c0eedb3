"""`dalle-lean calculator`: quick, complete, and one line for a mistake."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dalle_lean import DalleConfig, MemoryPlan
from dalle_lean.cli import main
from dalle_lean.memory import TrainingSetup, cost_of
from dalle_lean.memory.published_models import PRESETS
from training.run.recipe import load_recipe, recipe_names
from training.run.subjects import find_subject

ROOT = Path(__file__).parents[3]


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["calculator", *map(str, arguments)])
    said = capsys.readouterr()
    return stop.value.code, said.out, said.err


def found(capsys, *arguments):
    code, out, err = call(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_it_answers_without_torch():
    script = (
        "import sys; from dalle_lean.cli import main\n"
        "try: main(['calculator', 'paper', '--budget', '12GB'])\n"
        "except SystemExit as stop: sys.exit(stop.code or ('torch' in sys.modules) * 3)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "125,894,244 parameters" in result.stdout


def test_the_papers_model_on_the_table_and_in_json(capsys):
    code, out, _ = call(capsys, "paper", "--batch", 4, "--precision", "bf16", "--budget", "12GB", "--tflops", 10)
    answer = found(capsys, "paper", "--batch", 4, "--precision", "bf16", "--budget", "12GB", "--tflops", 10)
    assert code == 0
    assert answer["parameters"] == 125_894_244
    assert answer["device_bytes"] == sum(answer["device"].values()) <= 12e9
    assert answer["step_seconds"] == answer["step_flop"] / 1e13
    assert f"largest batch in 12 GB with this plan: {answer['largest_batch']}" in out
    kinds = ("weights", "gradients", "activations", "low-precision weights, position table", "backward of one layer")
    for words in (*kinds, "sum at the peak", "TFLOP", "a step takes"):
        assert words in out


def test_the_largest_batch_fits_and_the_next_does_not(capsys):
    arguments = ("paper", "--precision", "bf16", "--plan", "reversible,samples=1", "--budget", "4GB")
    most = found(capsys, *arguments)["largest_batch"]
    assert most > 1
    assert found(capsys, *arguments, "--batch", most)["device_bytes"] <= 4e9
    assert found(capsys, *arguments, "--batch", most + 1)["device_bytes"] > 4e9


def test_what_a_recipe_leaves_out_is_what_training_takes(capsys, tmp_path):
    (tmp_path / "mine.toml").write_text("[model]\nnum_layers = 8\n[optimizer]\nblock_size = 256\n")
    recipe, subject = load_recipe(tmp_path / "mine.toml"), find_subject(str(tmp_path / "mine.toml"))
    assert subject.setup.batch == recipe.data.batch_size == 4096
    assert subject.model.text_vocab_size == recipe.data.text_vocab_size == 4096
    assert subject.setup.block_size == 256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\n[memory]\nsamples = 1\n", "its [model] is missing or empty"),
        ("[model]\nnum_layers = 8\n[memory]\nsampels = 1\n", "[memory] sampels: unknown key"),
        ("[model]\nnum_layers = 8\n[data]\nbatch_size = 10\n[memory]\nmicro_batches = 4\n", "must be a multiple"),
        ("[model]\nnum_layers = 8\n[schedule]\nlength_warmup = [[1, 999, 1]]\n", "length_warmup = [1, 999, 1]"),
        (
            '[model]\nnum_layers = 8\n[memory]\noffload_optimizer = true\n[optimizer]\nname = "adamw8bit"\n',
            "[memory] offload_optimizer: adamw8bit has no such setting",
        ),
    ],
)
def test_what_training_refuses_has_no_price(capsys, tmp_path, text, words):
    (tmp_path / "mine.toml").write_text(text)
    code, out, err = call(capsys, tmp_path / "mine.toml")
    assert (code, out) == (2, "")
    assert words in err


def test_training_refuses_it_with_these_options_too(capsys):
    assert "must be one of" in call(capsys, "emoji64", "--precision", "bf15")[2]
    assert "needs branches" not in call(capsys, "emoji64", "--precision", "fp16")[2]
    assert "need branches" in call(capsys, "emoji64", "--precision", "fp16", "--plan", "keep")[2]
    assert "only lamb keeps" in call(capsys, "emoji64", "--precision", "bf16-weights", "--optimizer", "adamw")[2]


def test_a_plan_says_that_adamw_is_not_offloaded(capsys):
    assert found(capsys, "paper", "--optimizer", "adamw8bit")["plan"]["offload_optimizer"] is False
    assert found(capsys, "paper")["plan"]["offload_optimizer"] is True


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_read_as_training_reads_it(name):
    subject, recipe = find_subject(name), load_recipe(name)
    for field in dataclasses.fields(MemoryPlan):
        assert getattr(subject.plan, field.name) == getattr(recipe.memory, field.name), field.name
    assert subject.precision == recipe.memory.precision
    assert subject.setup.batch == recipe.data.batch_size // recipe.memory.micro_batches
    assert subject.setup.optimizer.startswith(recipe.optimizer.name)
    for field, value in recipe.model.items():
        wanted = tuple(value) if isinstance(value, list) else value
        assert getattr(subject.model, field) == wanted


def test_a_recipe_of_ones_own_and_a_model_folder(capsys, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        '[model]\nnum_layers = 8\n[memory]\nsamples = 0\nactivations = ""\n[optimizer]\nname = "adamw8bit"\n'
    )
    mine = found(capsys, recipe)
    assert mine["model"] == "mine"
    assert (mine["plan"]["samples"], mine["plan"]["activations"]) == (None, None)
    assert mine["setup"]["optimizer"] == "adamw8bit"
    bundled = found(capsys, ROOT / "models" / "emoji")
    content = json.loads((ROOT / "models" / "emoji" / "config.json").read_text())
    cost = cost_of(DalleConfig.from_dict(content["dalle"]), MemoryPlan(), TrainingSetup())
    assert bundled["device_bytes"] == cost.peak_bytes


def test_help_names_every_published_model(capsys):
    _, out, _ = call(capsys, "--help")
    words = re.split(r"[\s,.]+", re.sub(r"-\s+", "-", out))
    assert set(PRESETS) <= set(words)


def test_published_models_take_shorter_samples_and_shared_weights(capsys):
    whole = found(capsys, "gpt2-large", "--batch", 2)
    shorter = found(capsys, "gpt2-large", "--batch", 2, "--tokens", 256)
    shared = found(capsys, "gpt2-large", "--batch", 2, "--shared-blocks", 1)
    again = found(capsys, "gpt2-large", "--batch", 2, "--plan", "checkpoint")
    assert whole["parameters"] == shorter["parameters"] == 774_030_080
    assert shared["parameters"] < 100e6
    assert max(cost["device_bytes"] for cost in (shorter, shared, again)) < whole["device_bytes"]


def test_other_precisions_optimizers_and_devices_cost_what_they_should(capsys):
    half = found(capsys, "paper", "--precision", "bf16-weights")
    assert half["device"]["weights"] == 2 * half["parameters"]
    assert half["host"]["master_weights"] == 4 * half["parameters"]
    adamw = found(capsys, "paper", "--optimizer", "adamw")
    assert adamw["host_bytes"] == 0
    assert adamw["device"]["optimizer_state"] > 8 * adamw["parameters"]
    on_cpu = found(capsys, "paper", "--device", "cpu")
    assert on_cpu["host_bytes"] == 0
    assert on_cpu["device"]["optimizer_state"] > 2 * on_cpu["parameters"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "no model 'nothing'"),
        (["paper", "--batch", "0"], "batch=0"),
        (["paper", "--precision", "int4"], "precision='int4'"),
        (["paper", "--optimizer", "sgd"], "optimizer='sgd'"),
        (["paper", "--device", "tpu"], "device='tpu'"),
        (["paper", "--plan", "checkpoint"], "a reversible model takes keep, reversible"),
        (["paper", "--plan", "reversible,sample=1"], "unknown field 'sample'"),
        (["paper", "--budget", "12XB"], "not an amount of memory"),
        (["paper", "--budget", "1GB"], "needs at least"),
        (["gpt3", "--budget", "80GB"], "needs at least"),
        (["gpt2", "--plan", "selective"], "keep or checkpoint"),
        (["paper", "--tokens", "5"], "always has 1280"),
        (["gpt2", "--tokens", "1025"], "tokens=1025"),
        (["paper", "--shared-blocks", "3"], "shares block"),
        (["paper", "--tflops", "0"], "--tflops"),
        (["paper", "--page", "--batch", "4"], "--page takes MODEL"),
        (["paper", "--page", "--device", "cpu"], "--page takes MODEL"),
        (["nothing", "--page"], "no model 'nothing'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, words):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["[model", "[memory]\n", "model = 3\n", "[model]\nlayers = 3\n", '[model]\n[data]\nbatch_size = "x"\n']
)
def test_a_file_that_is_no_recipe_is_refused_by_name(capsys, tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    code, _, err = call(capsys, path)
    assert code == 2
    assert "broken.toml" in err


def test_a_folder_that_is_no_model_is_refused(capsys, tmp_path):
    assert "has no config.json" in call(capsys, tmp_path)[2]
    (tmp_path / "config.json").write_text("[]")
    assert "is not of the format dalle_lean_model/1" in call(capsys, tmp_path)[2]
    (tmp_path / "config.json").write_text('{"format": "dalle_lean_model/1"}')
    assert "has no section dalle" in call(capsys, tmp_path)[2]
