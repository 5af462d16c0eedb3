import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from dalle_lean.errors import UserError
from dalle_lean.optim.lamb import Lamb, has_numba
from training.run.checkpoint import load_checkpoint, save_checkpoint

LR = 0.01
LOW_PRECISIONS = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["fused", "plain"])
def fused(request):
    """With numba and without."""
    if request.param == "fused" and not has_numba():
        pytest.skip("numba is not installed")
    return request.param == "fused"


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


def eight_bit_lamb(parameters, **settings):
    """Lamb with 8-bit statistics for small tensors too."""
    return Lamb(parameters, **{"lr": LR, "min_eight_bit_numel": 1, **settings})


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


@pytest.mark.parametrize(
    "setting",
    [
        {"lr": -1e-3},
        {"lr": math.nan},
        {"eps": -1e-6},
        {"weight_decay": math.inf},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"clamp_weight_norm": 0.0},
        {"block_size": 0},
        {"min_eight_bit_numel": -1},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_by_name(setting):
    weight = torch.nn.Parameter(torch.ones(4))
    (name,) = setting
    with pytest.raises(UserError, match=f"^{name} = "):
        Lamb([weight], **{"lr": 1e-3} | setting)
    with pytest.raises(UserError, match=f"^{name} = "):
        Lamb([{"params": [weight], **setting}], lr=1e-3)


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
def test_eight_bits_stay_within_three_percent_of_the_way_after_ten_steps(block_size, fused):
    gradients, start = gradients_of((170, 180), 10), weights_of((170, 180))
    ends = []
    for eight_bit in (True, False):
        parameter = nn.Parameter(start.clone())
        optimizer = eight_bit_lamb([parameter], eight_bit=eight_bit, block_size=block_size, fused=fused)
        ends.append(run(optimizer, parameter, gradients)[-1])
    error, way = (ends[0] - ends[1]).norm(), (ends[1] - start).norm()
    assert 0 < error < 0.03 * way


def test_eight_bit_statistics_take_little_more_than_two_bytes_an_element():
    parameter = nn.Parameter(weights_of((512, 512)))
    optimizer = Lamb([parameter], lr=LR)
    run(optimizer, parameter, gradients_of((512, 512), 1))
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) < 2.01 * parameter.numel()


@pytest.mark.parametrize("block_size", [48, 256])
def test_rows_that_never_get_a_gradient_do_not_move_in_200_steps(block_size, fused):
    start = weights_of((64, 32))  # a block holds one row and a half, or eight
    parameter = nn.Parameter(start.clone())
    optimizer = Lamb([parameter], lr=LR, weight_decay=0.0, block_size=block_size, min_eight_bit_numel=1, fused=fused)
    gradients = gradients_of((64, 32), 200)
    for gradient in gradients:
        gradient[1::2] = 0
    run(optimizer, parameter, gradients)
    assert torch.equal(parameter[1::2], start[1::2])
    assert not (parameter[::2] == start[::2]).any()


def test_a_row_seen_once_does_not_disturb_its_neighbours_in_the_block(fused):
    parameter = nn.Parameter(weights_of((4, 64)))
    optimizer = Lamb([parameter], lr=LR, weight_decay=0.0, block_size=256, min_eight_bit_numel=1, fused=fused)
    still = parameter.detach()[[0, 2, 3]].clone()
    gradient = torch.zeros(4, 64)
    gradient[1] = 1e3
    run(optimizer, parameter, [gradient, torch.zeros(4, 64), torch.zeros(4, 64)])
    assert torch.equal(parameter[[0, 2, 3]], still)


def test_where_a_norm_is_zero_the_step_is_adams():
    parameter = nn.Parameter(torch.zeros(5))
    optimizer = Lamb([parameter], lr=LR, eps=0.0)
    (step,) = run(optimizer, parameter, [torch.ones(5)])
    torch.testing.assert_close(step, torch.full((5,), -LR * 0.1 / 0.04**0.5))
    still = nn.Parameter(torch.ones(5))
    assert torch.equal(run(Lamb([still], lr=LR, weight_decay=0.0), still, [torch.zeros(5)])[0], torch.ones(5))


def test_the_trust_ratio_takes_the_clamped_norm_and_an_empty_parameter_nothing(fused):
    ends = []
    for clamp in (0.5, 1.0):
        parameter = nn.Parameter(torch.ones(100))
        settings = {"min_eight_bit_numel": 1, "fused": fused, "clamp_weight_norm": clamp}
        ends.append(1 - run(Lamb([parameter], lr=LR, **settings), parameter, [torch.ones(100)])[0])
        torch.testing.assert_close(ends[-1].norm(), torch.tensor(LR * clamp), rtol=1e-4, atol=0)
    torch.testing.assert_close(ends[1], 2 * ends[0], rtol=1e-4, atol=0)
    empty = nn.Parameter(torch.ones(0, 5))
    run(Lamb([empty], lr=LR, min_eight_bit_numel=0, fused=fused), empty, [torch.ones(0, 5)])


def test_where_weights_are_zero_eight_bits_step_like_adam_too(fused):
    parameter = nn.Parameter(torch.zeros(500))
    optimizer = Lamb([parameter], lr=LR, min_eight_bit_numel=1, fused=fused)
    (step,) = run(optimizer, parameter, [torch.ones(500)])
    torch.testing.assert_close(step, torch.full((500,), -LR * 0.1 / 0.04**0.5), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path, eight_bit, dtype):
    gradients, start = gradients_of((170, 180), 6), weights_of((170, 180)).to(dtype)
    gradients = [gradient.to(dtype) for gradient in gradients]
    parameter = nn.Parameter(start.clone())
    optimizer = eight_bit_lamb([parameter], eight_bit=eight_bit)
    run(optimizer, parameter, gradients[:3])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")

    twin = nn.Parameter(parameter.detach().clone())
    restored = eight_bit_lamb([twin], lr=1.0, eight_bit=eight_bit)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(run(restored, twin, gradients[3:])[-1], run(optimizer, parameter, gradients[3:])[-1])


@pytest.mark.parametrize("dtype", LOW_PRECISIONS)
def test_master_weights_are_those_of_a_float32_run_and_the_parameter_is_their_rounding(dtype, fused):
    start = weights_of((170, 180)).to(dtype)
    gradients = [gradient.to(dtype) for gradient in gradients_of((170, 180), 10)]
    low, full = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizer = eight_bit_lamb([low], master_weights=True, fused=fused)
    run(optimizer, low, gradients)
    run(eight_bit_lamb([full], fused=fused), full, [gradient.float() for gradient in gradients])
    assert torch.equal(optimizer.state[low]["master"], full)
    assert torch.equal(low, full.to(dtype))


def test_steps_too_small_for_bfloat16_add_up_in_the_master_weights():
    ends = {}
    for master_weights in (True, False):
        parameter = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
        optimizer = Lamb([parameter], lr=1e-3, weight_decay=0.0, master_weights=master_weights)
        ends[master_weights] = run(optimizer, parameter, [torch.ones(100, dtype=torch.bfloat16)] * 10)[-1].float()
    torch.testing.assert_close(ends[True], torch.full((100,), 0.99), rtol=2**-9, atol=0)
    assert torch.equal(ends[False], torch.ones(100))


def test_master_weights_come_back_from_the_trainers_checkpoint(tmp_path, fused):
    gradients = [gradient.bfloat16() for gradient in gradients_of((170, 180), 6)]
    models = [nn.Linear(180, 170, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    optimizers = [eight_bit_lamb(model.parameters(), master_weights=True, fused=fused) for model in models]
    run(optimizers[0], models[0].weight, gradients[:3])
    save_checkpoint(tmp_path, model=models[0], optimizer=optimizers[0], progress={}, run={})
    load_checkpoint(tmp_path, model=models[1], optimizer=optimizers[1], run={})
    for model, optimizer in zip(models, optimizers, strict=True):
        run(optimizer, model.weight, gradients[3:])
    masters = [optimizer.state[model.weight]["master"] for model, optimizer in zip(models, optimizers, strict=True)]
    assert masters[0].dtype == torch.float32
    assert torch.equal(*masters)
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_master_weight_follows_what_is_changed_from_outside_and_only_that():
    parameter = nn.Parameter(weights_of((20, 20)).bfloat16())
    optimizer = Lamb([parameter], lr=1e-4, master_weights=True)
    run(optimizer, parameter, [gradient.bfloat16() for gradient in gradients_of((20, 20), 3)])
    kept = optimizer.state[parameter]["master"].clone()
    parameter.data[0] = 7.0
    parameter.grad = torch.zeros(20, 20, dtype=torch.bfloat16)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    master = optimizer.state[parameter]["master"]
    assert torch.equal(master[1:], kept[1:])
    assert (master[0] == 7).all()


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_parameters_and_gradients_may_have_any_float_type(dtype, gradient_dtype, fused):
    parameter = nn.Parameter(torch.ones(300, dtype=dtype))
    parameter.grad_dtype = gradient_dtype
    optimizer = Lamb([parameter], lr=LR, min_eight_bit_numel=1, fused=fused)
    (step,) = run(optimizer, parameter, [torch.ones(300, dtype=gradient_dtype)])
    assert step.dtype == dtype
    torch.testing.assert_close(step.double(), torch.full((300,), 1 - LR).double(), rtol=4e-3, atol=0)


def test_state_of_version_0_1_0_goes_on_where_it_stood(fused):
    saved = torch.load(Path(__file__).parents[2] / "golden" / "lamb_state.pt", weights_only=True)
    parameters = [nn.Parameter(weight) for weight in saved["weights"]]
    optimizer = Lamb(parameters, lr=1.0, fused=fused)
    optimizer.load_state_dict(saved["optimizer"])
    for gradients in saved["gradients"]:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    for parameter, weight in zip(parameters, saved["weights_after"], strict=True):
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-5, atol=1e-6)


def test_statistics_that_do_not_fit_are_refused_by_name():
    def trained(block_size):
        parameter = nn.Parameter(weights_of((10, 30)))
        optimizer = Lamb([parameter], lr=LR, block_size=block_size, min_eight_bit_numel=1)
        run(optimizer, parameter, gradients_of((10, 30), 1))
        return optimizer

    cases = {
        "mean_scales": ("mean_scales", torch.zeros(1)),
        "square_codes": ("square_codes", torch.zeros(10, 30)),
        "mean_codes": ("mean_codes", torch.zeros(300, dtype=torch.uint8)),
    }
    for match, (name, wrong) in cases.items():
        state = copy.deepcopy(trained(64).state_dict())
        state["state"][0][name] = wrong
        with pytest.raises(ValueError, match=f"optimizer state {match}"):
            trained(64).load_state_dict(state)
    optimizer = trained(64)
    optimizer.param_groups[0]["block_size"] = 32
    with pytest.raises(ValueError, match="optimizer state mean_scales"):
        optimizer.step()


@pytest.mark.parametrize("step", [None, -1, 1.0, True, "1", torch.tensor(1)])
def test_a_state_without_its_number_of_steps_is_refused(step):
    parameter = nn.Parameter(weights_of((10, 30)))
    optimizer = eight_bit_lamb([parameter])
    run(optimizer, parameter, gradients_of((10, 30), 1))
    state = copy.deepcopy(optimizer.state_dict())
    if step is None:
        del state["state"][0]["step"]
    else:
        state["state"][0]["step"] = step
    with pytest.raises(ValueError, match=r"optimizer state step of a parameter of shape \[10, 30\] is"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize("wrong", [torch.zeros(30, 10), torch.zeros(10, 30, dtype=torch.int64), None])
def test_a_master_copy_that_does_not_fit_is_refused_by_name(wrong):
    parameter = nn.Parameter(weights_of((10, 30)).bfloat16())
    optimizer = eight_bit_lamb([parameter], master_weights=True)
    run(optimizer, parameter, [gradient.bfloat16() for gradient in gradients_of((10, 30), 1)])
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["master"] = wrong
    with pytest.raises(ValueError, match=r"optimizer state master of a parameter of shape \[10, 30\] is"):
        optimizer.load_state_dict(state)


def test_a_copied_optimizer_keeps_how_it_computes():
    settings = {"master_weights": True, "offload": False, "fused": False}
    optimizer = Lamb([nn.Parameter(torch.ones(3))], lr=LR, **settings)
    twin = copy.deepcopy(optimizer)
    assert {name: getattr(twin, name) for name in settings} == settings


def test_a_transposed_parameter_moves_like_a_straight_one(fused):
    gradients = gradients_of((170, 190), 3)
    straight = nn.Parameter(weights_of((170, 190)))
    turned = nn.Parameter(straight.detach().t().contiguous().t())
    assert not turned.is_contiguous()
    for parameter in (straight, turned):
        run(eight_bit_lamb([parameter], fused=fused), parameter, gradients)
    assert torch.equal(turned, straight)


def test_a_parameter_that_stands_twice_is_updated_once():
    gradients = gradients_of((30, 40), 3)
    tied, once = nn.Parameter(weights_of((30, 40))), nn.Parameter(weights_of((30, 40)))
    run(Lamb([tied, tied], lr=LR), tied, gradients)
    run(Lamb([once], lr=LR), once, gradients)
    assert torch.equal(tied, once)


def test_autograd_sees_that_weights_have_changed(fused):
    parameter = nn.Parameter(weights_of((20, 20)))
    loss = (parameter**2).sum()
    run(Lamb([parameter], lr=LR, min_eight_bit_numel=1, fused=fused), parameter, gradients_of((20, 20), 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="no sparse gradients"):
        Lamb(embedding.parameters(), lr=LR).step()


def test_a_step_with_a_gradient_that_is_not_finite_is_partial(fused):
    parameters = [nn.Parameter(weights_of((20, 20))) for _ in range(3)]
    optimizer = eight_bit_lamb(parameters, fused=fused)
    for parameter in parameters:
        parameter.grad = torch.ones(20, 20)
    parameters[1].grad[3, 3] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        optimizer.step()
    assert [optimizer.state[parameter].get("step") for parameter in parameters] == [1, 0, None]
    assert [torch.equal(parameter, weights_of((20, 20))) for parameter in parameters] == [False, True, True]


def test_parameters_without_a_gradient_are_left_alone():
    parameter = nn.Parameter(torch.ones(3))
    Lamb([parameter], lr=LR).step()
    assert torch.equal(parameter, torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("block_size", [256, 100])
def test_on_a_gpu_the_way_is_that_of_the_cpu(offload, block_size):
    gradients, start = gradients_of((170, 180), 5), weights_of((170, 180))
    on_cpu, on_gpu = nn.Parameter(start.clone()), nn.Parameter(start.cuda())
    run(eight_bit_lamb([on_cpu], block_size=block_size), on_cpu, gradients)
    optimizer = eight_bit_lamb([on_gpu], block_size=block_size, offload=offload)
    run(optimizer, on_gpu, [gradient.cuda() for gradient in gradients])
    assert optimizer.state[on_gpu]["mean_codes"].is_cuda != offload
    error, way = (on_gpu.cpu() - on_cpu).norm(), (on_cpu - start).norm()
    assert error < 0.003 * way


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [48, 64])
def test_on_a_gpu_rows_that_never_get_a_gradient_do_not_move(block_size):
    start = weights_of((64, 32)).cuda()
    parameter = nn.Parameter(start.clone())
    settings = {"weight_decay": 0.0, "block_size": block_size, "min_eight_bit_numel": 1, "offload": False}
    gradients = [gradient.cuda() for gradient in gradients_of((64, 32), 50)]
    for gradient in gradients:
        gradient[1::2] = 0
    run(Lamb([parameter], lr=LR, **settings), parameter, gradients)
    assert torch.equal(parameter[1::2], start[1::2])
