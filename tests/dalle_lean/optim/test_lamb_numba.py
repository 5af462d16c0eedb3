"""The compiled step against its plain twin."""

import sys

import pytest
import torch
from torch import nn

from dalle_lean.optim.lamb import Lamb, has_numba
from dalle_lean.optim.lamb_step import StepSettings, new_statistics, step_plain
from dalle_lean.require import MissingPackage
from tests.compiled_code import outputs_compiled_and_cached

pytest.importorskip("numba")
from dalle_lean.optim import lamb_numba as lamb_fused
from dalle_lean.optim.lamb_numba import step_fused


def step_settings(block_size, **settings):
    numbers = {"lr": 0.01, "beta_mean": 0.9, "beta_square": 0.96, "eps": 1e-6, "weight_decay": 0.045}
    return StepSettings(**{**numbers, "clamp_weight_norm": 1e4, "block_size": block_size, **settings})


def numbers(numel, seed):
    """Numbers of very different size, every fifth exactly zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10 ** (-6 * torch.rand(numel, generator=generator))
    x[::5] = 0
    return x


def after_some_steps(numel, block_size):
    """(weight, gradient, statistics) in the middle of a run."""
    weight = numbers(numel, 0)
    statistics = new_statistics(weight, block_size=block_size)
    for seed in range(1, 4):
        step_plain(weight, numbers(numel, seed), statistics, step_settings(block_size))
    return weight, numbers(numel, 9), statistics


def copy_of(statistics):
    return {name: tensor.clone() for name, tensor in statistics.items()}


@pytest.mark.parametrize("corrections", [{}, {"mean_correction": 1 / 0.19, "square_correction": 1 / 0.08}])
@pytest.mark.parametrize("block_size", [1, 64, 100, 4096, 20_000])
@pytest.mark.parametrize("numel", [1, 9_000])
def test_a_step_is_the_plain_step(numel, block_size, corrections):
    weight, gradient, statistics = after_some_steps(numel, block_size)
    plain, plain_state = weight.clone(), copy_of(statistics)
    fused, fused_state = weight.clone(), copy_of(statistics)
    step_plain(plain, gradient, plain_state, step_settings(block_size, **corrections))
    step_fused(fused, gradient, fused_state, step_settings(block_size, **corrections))
    # The order of sums and the rounding of products differ: a few units in the last of float32's 24 bits.
    torch.testing.assert_close(fused - weight, plain - weight, rtol=1e-5, atol=3e-7)
    for name in ("mean", "square"):
        torch.testing.assert_close(fused_state[f"{name}_scales"], plain_state[f"{name}_scales"], rtol=1e-6, atol=1e-8)
        apart = (fused_state[f"{name}_codes"].int() - plain_state[f"{name}_codes"].int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.001


@pytest.mark.parametrize("chunk_size", [1, 100, 4096, 10**9])
def test_the_plain_step_does_not_depend_on_its_chunks(chunk_size):
    weight, gradient, statistics = after_some_steps(9_000, 256)
    whole, chunked, whole_state, chunked_state = (
        weight.clone(),
        weight.clone(),
        copy_of(statistics),
        copy_of(statistics),
    )
    step_plain(whole, gradient, whole_state, step_settings(256))
    step_plain(chunked, gradient, chunked_state, step_settings(256), chunk_size)
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-9)
    assert all(torch.equal(chunked_state[name], whole_state[name]) for name in whole_state)


def test_the_result_does_not_depend_on_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(lamb_fused, "SMALLEST_SPAN", 256)
    weight, gradient, statistics = after_some_steps(9_000, 256)
    before = torch.get_num_threads()
    ends = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            end, state = weight.clone(), copy_of(statistics)
            step_fused(end, gradient, state, step_settings(256))
            ends.append([end, *state.values()])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in ends[1:] for a, b in zip(ends[0], other, strict=True))


@pytest.mark.parametrize("step", [step_fused, step_plain])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_is_refused_before_anything_changes(step, bad):
    weight, gradient, statistics = after_some_steps(9_000, 256)
    gradient[8_500] = bad
    end, state = weight.clone(), copy_of(statistics)
    with pytest.raises(ValueError, match="not finite"):
        step(end, gradient, state, step_settings(256))
    assert torch.equal(end, weight)
    assert all(torch.equal(state[name], statistics[name]) for name in state)


@pytest.mark.parametrize("step", [step_fused, step_plain])
def test_averages_that_fade_become_zero_and_not_subnormal(step):
    weight = torch.ones(512)
    statistics = new_statistics(weight, block_size=256)
    step(weight, torch.full((512,), 3e-19), statistics, step_settings(256))
    for _ in range(60):
        step(weight, torch.zeros(512), statistics, step_settings(256, weight_decay=0.0))
    assert statistics["square_scales"].tolist() == [0, 0]
    assert torch.isfinite(weight).all()


def test_numba_is_used_where_it_is_and_only_where_it_fits(monkeypatch):
    calls = []
    monkeypatch.setattr(lamb_fused, "step_fused", lambda *arguments: calls.append(arguments[0].numel()))
    eight_bit, vector = nn.Parameter(torch.ones(300, 300)), nn.Parameter(torch.ones(300))
    for fused in (None, True, False):
        optimizer = Lamb([eight_bit, vector], lr=0.01, fused=fused)
        eight_bit.grad, vector.grad = torch.ones(300, 300), torch.ones(300)
        optimizer.step()
    assert calls == [90_000, 90_000]


def test_without_numba_the_plain_step_runs_and_asking_for_it_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "dalle_lean.optim.lamb_numba")
    monkeypatch.delitem(sys.modules, "dalle_lean.compiled")
    has_numba.cache_clear()
    try:
        parameter = nn.Parameter(torch.ones(300, 300))
        parameter.grad = torch.ones(300, 300)
        Lamb([parameter], lr=0.01).step()
        assert (parameter < 1).all()
        with pytest.raises(MissingPackage, match=r"numba is not installed; install it with: pip install .*training"):
            Lamb([parameter], lr=0.01, fused=True)
    finally:
        has_numba.cache_clear()


THREE_STEPS = """
import hashlib, torch
from torch import nn
from dalle_lean.optim.lamb import Lamb
generator = torch.Generator().manual_seed(0)
weight = nn.Parameter(torch.randn(300, 300, generator=generator))
optimizer = Lamb([weight], lr=0.01, fused=True)
for _ in range(3):
    weight.grad = torch.randn(300, 300, generator=generator)
    optimizer.step()
print(hashlib.sha256(weight.detach().numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_steps_have_the_same_bits_compiled_as_from_the_cache(tmp_path):
    compiled_first, from_cache = outputs_compiled_and_cached(THREE_STEPS, tmp_path)
    assert compiled_first == from_cache
