from typing import Any

import pytest
import torch
from torch import nn

from dalle_lean import Dalle, DalleConfig
from dalle_lean.optim import Lamb, parameter_groups

LR = 0.01


def plain_lamb(weights, gradients, *, lr, beta1, beta2, eps, weight_decay, clamp, bias_correction=False):
    """The slow, obvious twin: one tensor, the paper's formulas, float64 -> the weights after each step."""
    w = weights.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    history = []
    for t, g in enumerate(gradients, start=1):
        g = g.double()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = (m / (1 - beta1**t), v / (1 - beta2**t)) if bias_correction else (m, v)
        r = m_hat / (v_hat.sqrt() + eps) + weight_decay * w
        w_norm, r_norm = (w**2).sum().sqrt().clamp(max=clamp), (r**2).sum().sqrt()
        ratio = w_norm / r_norm if w_norm > 0 and r_norm > 0 else 1.0
        w = w - lr * ratio * r
        history.append(w)
    return history


def run(optimizer, parameter, gradients):
    history = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        history.append(parameter.detach().clone())
    return history


def gradients_of(shape, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** (-step % 3) for step in range(steps)]


def weights_of(shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("clamp", [1e4, 2.0])
def test_each_step_is_that_of_plain_lamb(bias_correction, clamp):
    gradients, start = gradients_of((30, 40), 8), weights_of((30, 40))
    parameter = nn.Parameter(start.clone())
    optimizer = Lamb([parameter], lr=LR, clamp_weight_norm=clamp, bias_correction=bias_correction)
    steps = run(optimizer, parameter, gradients)
    settings = {"lr": LR, "beta1": 0.9, "beta2": 0.96, "eps": 1e-6, "weight_decay": 0.045, "clamp": clamp}
    for step, wanted in zip(
        steps, plain_lamb(start, gradients, **settings, bias_correction=bias_correction), strict=True
    ):
        torch.testing.assert_close(step.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block_size", [256, 4096])
def test_eight_bits_stay_within_three_percent_of_the_way_after_ten_steps(block_size):
    gradients, start = gradients_of((300, 300), 10), weights_of((300, 300))
    ends = []
    for eight_bit in (True, False):
        parameter = nn.Parameter(start.clone())
        optimizer = Lamb([parameter], lr=LR, eight_bit=eight_bit, block_size=block_size)
        ends.append(run(optimizer, parameter, gradients)[-1])
    error, way = (ends[0] - ends[1]).norm(), (ends[1] - start).norm()
    assert 0 < error < 0.03 * way


def test_eight_bit_statistics_take_little_more_than_two_bytes_an_element():
    parameter = nn.Parameter(weights_of((512, 512)))
    optimizer = Lamb([parameter], lr=LR)
    run(optimizer, parameter, gradients_of((512, 512), 1))
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) < 2.01 * parameter.numel()


def test_rows_that_never_get_a_gradient_do_not_move():
    start = weights_of((512, 256))
    parameter = nn.Parameter(start.clone())
    optimizer = Lamb([parameter], lr=LR, weight_decay=0.0)
    gradients = gradients_of((512, 256), 50)
    for gradient in gradients:
        gradient[1::2] = 0
    run(optimizer, parameter, gradients)
    assert torch.equal(parameter[1::2], start[1::2])
    assert not torch.equal(parameter[::2], start[::2])


def test_where_a_norm_is_zero_the_step_is_adams():
    parameter = nn.Parameter(torch.zeros(5))
    optimizer = Lamb([parameter], lr=LR, eps=0.0)
    (step,) = run(optimizer, parameter, [torch.ones(5)])
    torch.testing.assert_close(step, torch.full((5,), -LR * 0.1 / 0.04**0.5))
    still = nn.Parameter(torch.ones(5))
    assert torch.equal(run(Lamb([still], lr=LR, weight_decay=0.0), still, [torch.zeros(5)])[0], torch.ones(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path, eight_bit, dtype):
    gradients, start = gradients_of((300, 300), 6), weights_of((300, 300)).to(dtype)
    gradients = [gradient.to(dtype) for gradient in gradients]
    parameter = nn.Parameter(start.clone())
    optimizer = Lamb([parameter], lr=LR, eight_bit=eight_bit)
    run(optimizer, parameter, gradients[:3])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")

    twin = nn.Parameter(parameter.detach().clone())
    restored = Lamb([twin], lr=1.0, eight_bit=eight_bit)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(run(restored, twin, gradients[3:])[-1], run(optimizer, parameter, gradients[3:])[-1])


def test_a_transposed_parameter_moves_like_a_straight_one():
    gradients = gradients_of((300, 400), 3)
    straight = nn.Parameter(weights_of((300, 400)))
    turned = nn.Parameter(straight.detach().t().contiguous().t())
    assert not turned.is_contiguous()
    for parameter in (straight, turned):
        run(Lamb([parameter], lr=LR), parameter, gradients)
    torch.testing.assert_close(turned, straight)


def test_parameters_without_a_gradient_are_left_alone():
    parameter = nn.Parameter(torch.ones(3))
    Lamb([parameter], lr=LR).step()
    assert torch.equal(parameter, torch.ones(3))


def test_wrong_settings_are_refused_by_name():
    wrong: dict[str, Any] = {"lr": -1.0, "eps": float("nan"), "betas": (0.9, 1.0), "block_size": 0}
    for name, value in wrong.items():
        settings = {"lr": LR, name: value}
        with pytest.raises(ValueError, match=name):
            Lamb([nn.Parameter(torch.ones(1))], **settings)


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
