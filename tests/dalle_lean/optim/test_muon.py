"""Muon for the blocks' matrices, AdamW for the rest."""

import pytest
import torch

from dalle_lean import Dalle, DalleConfig
from dalle_lean.optim.muon import MOMENTUM, MuonAdamW
from dalle_lean.optim.parameter_groups import muon_groups, parameter_groups

CONFIG = DalleConfig(
    text_vocab_size=50, text_len=4, image_vocab_size=20, image_side=3, hidden_size=16, num_layers=5, num_heads=2,
    head_size=8, attention_pattern=("row", "column"),
)  # fmt: skip
LR, DECAY = 0.01, 0.1
SETTINGS = {"lr": LR, "betas": (0.9, 0.96), "eps": 1e-6}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Dalle(CONFIG)


def randn_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_takes_the_matrices_of_the_blocks_and_each_parameter_stands_once(model):
    hidden, tables, vectors = muon_groups(model, DECAY)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(parameter)].startswith("blocks.") and parameter.ndim == 2 for parameter in hidden["params"])
    assert not any(names[id(parameter)].startswith("blocks.") for parameter in tables["params"])
    assert [group["weight_decay"] for group in (hidden, tables, vectors)] == [DECAY, DECAY, 0.0]
    grouped = [id(parameter) for group in (hidden, tables, vectors) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_a_step_of_muon_turns_the_momentum_into_a_matrix_of_like_singular_values(model):
    weight = model.blocks[0].feed_forward.up.weight
    before, momentum = weight.detach().clone(), torch.zeros_like(weight)
    optimizer = MuonAdamW(muon_groups(model, DECAY), **SETTINGS)
    for seed in range(2):
        before = weight.detach().clone()
        randn_gradients(model, seed)
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * weight.grad
        nesterov = MOMENTUM * momentum + (1 - MOMENTUM) * weight.grad
        optimizer.step()
    update = (before * (1 - LR * DECAY) - weight.detach()) / (LR * 0.2 * max(weight.shape) ** 0.5)
    left, _, right = torch.linalg.svd(nesterov, full_matrices=False)
    turned = left.T @ update @ right.T  # diagonal where the singular vectors are the momentum's
    values = turned.diagonal()
    # What five steps of Newton-Schulz leave of 1.
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert (turned - values.diag()).abs().max() < 0.05  # bfloat16


def test_everything_else_takes_the_steps_of_adamw(model):
    twin = Dalle(CONFIG)
    twin.load_state_dict(model.state_dict())
    optimizers = [
        MuonAdamW(muon_groups(model, DECAY), **SETTINGS),
        torch.optim.AdamW(parameter_groups(twin, DECAY), **SETTINGS, fused=True),
    ]
    for seed in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            randn_gradients(each, seed)
            optimizer.step()
    muons = {id(parameter) for parameter in muon_groups(model, DECAY)[0]["params"]}
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other) == (id(one) not in muons)
