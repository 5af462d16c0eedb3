"""An optimizer by its name, and the parameters that it takes."""

import sys

import pytest
import torch
from torch import nn

from dalle_lean import Dalle, DalleConfig
from dalle_lean.optim.make_optimizer import make_optimizer, parameter_groups
from dalle_lean.require import MissingPackage
from training.run.checkpoint import load_checkpoint, save_checkpoint

LR = 0.01


def take_steps(optimizer, parameter, gradients):
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()


def test_matrices_decay_and_vectors_do_not_and_each_parameter_stands_once():
    config = DalleConfig(
        text_vocab_size=50, text_len=4, image_vocab_size=20, image_side=3, hidden_size=16, num_layers=5, num_heads=2,
        head_size=8, shared_blocks=2, attention_pattern=("row", "column"),
    )  # fmt: skip
    model = Dalle(config)
    decaying, plain = parameter_groups(model, weight_decay=0.1)
    assert (decaying["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(name.endswith("weight") and "norm" not in name for name in (names[id(p)] for p in decaying["params"]))
    assert all("norm" in name or name.endswith(("bias", "scale")) for name in (names[id(p)] for p in plain["params"]))
    grouped = [id(parameter) for group in (decaying, plain) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("name", ["lamb", "adamw", "adamw8bit"])
def test_an_optimizer_is_made_by_its_name_and_resumes_bit_for_bit(tmp_path, name):
    if name == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    gradients = [torch.randn(170, 180, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    models = [nn.Linear(180, 170) for _ in range(2)]
    optimizers = [make_optimizer(name, parameter_groups(model, 0.1), lr=LR) for model in models]
    assert [group["weight_decay"] for group in optimizers[0].param_groups] == [0.1, 0.0]
    take_steps(optimizers[0], models[0].weight, gradients[:2])
    save_checkpoint(tmp_path, model=models[0], optimizer=optimizers[0], progress={}, run={})
    load_checkpoint(tmp_path, model=models[1], optimizer=optimizers[1], run={})
    for model, optimizer in zip(models, optimizers, strict=True):
        take_steps(optimizer, model.weight, gradients[2:])
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_missing_bitsandbytes_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingPackage, match=r"bitsandbytes is not installed; install it with: pip install .*training"):
        make_optimizer("adamw8bit", [{"params": [nn.Parameter(torch.ones(3))]}])


def test_wrong_choices_of_an_optimizer_are_refused_by_name():
    groups = [{"params": [nn.Parameter(torch.ones(3))]}]
    with pytest.raises(ValueError, match="optimizer 'sgd': must be one of lamb, adamw, adamw8bit, muon"):
        make_optimizer("sgd", groups)
    with pytest.raises(ValueError, match="block_size: adamw has no such setting"):
        make_optimizer("adamw", groups, block_size=64)
