"""GPT-2's files give what transformers gives with them (tests/golden/README.md)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dalle_lean.language import load_gpt2
from dalle_lean.memory import MemoryPlan
from tests.golden_data import GOLDEN

FOLDER = GOLDEN / "gpt2_tiny"
EXPECTED = load_file(FOLDER / "expected.safetensors")
IDS = EXPECTED["ids"]


def test_logits_are_those_of_transformers():
    torch.testing.assert_close(load_gpt2(FOLDER)(IDS), EXPECTED["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("activations", ["keep", "selective", "checkpoint"])
def test_loss_and_gradients_are_those_of_transformers(activations):
    model = load_gpt2(FOLDER, MemoryPlan(activations=activations))
    loss = model.loss(IDS)
    loss.backward()
    torch.testing.assert_close(loss, EXPECTED["loss"], rtol=0, atol=1e-5)
    table, projection = model.output.weight.grad, model.blocks[0].attention.qkv.weight.grad
    torch.testing.assert_close(table, EXPECTED["grad.transformer.wte.weight"], rtol=0, atol=1e-5)
    torch.testing.assert_close(projection.t(), EXPECTED["grad.transformer.h.0.attn.c_attn.weight"], rtol=0, atol=1e-5)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDER, tmp_path / "gpt2")


def rewrite(folder, change):
    """The folder with other weights."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)


def test_names_without_a_prefix_and_masks_are_the_hubs_first_files(folder):
    def older(weights):
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 12, 12)
        weights["lm_head.weight"] = weights["wte.weight"].clone()

    rewrite(folder, older)
    torch.testing.assert_close(load_gpt2(folder)(IDS), EXPECTED["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: weights.pop("transformer.ln_f.bias"), "missing key ln_f.bias"),
        (lambda weights: weights.update(other=torch.zeros(1)), "unknown key other"),
        (lambda weights: weights.update({"transformer.wpe.weight": torch.zeros(12, 23)}), r"must be \[12, 24\]"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(50, 24)}), "GPT-2 ties them"),
    ],
)
def test_other_weights_are_refused_by_name(folder, change, words):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=words):
        load_gpt2(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gptj"}, "model_type = 'gptj'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"activation_function": "swish"}, "activation_function = 'swish'"),
        ({"n_head": 5}, "a multiple of n_head"),
        ({"n_head": 0}, "n_head"),
        ({"n_embd": "24"}, "config.json"),
        ({"n_layer": 10**9}, "num_layers"),
        ({"n_layer": None}, "num_layers"),
    ],
)
def test_a_configuration_of_something_else_is_refused(folder, fields, words):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=words):
        load_gpt2(folder)


def test_a_folder_without_files_is_refused_by_name(tmp_path):
    with pytest.raises(OSError, match=r"config\.json"):
        load_gpt2(tmp_path)
