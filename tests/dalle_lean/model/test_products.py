"""Products by oneDNN are torch's products, and so are their gradients."""

import time

import pytest
import torch
from torch.nn import functional as F

from dalle_lean.model import products

pytestmark = pytest.mark.skipif(not products.HAS_ONEDNN, reason="torch without oneDNN")


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)


@pytest.mark.parametrize("rows", [(7,), (3, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("part", [(slice(None), slice(None)), (slice(8, 40), slice(16, 48))], ids=["whole", "part"])
def test_the_product_and_its_gradients_are_torchs(rows, has_bias, part):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((*rows, 64), (48, 64), (48,)))
    x, weight, bias = x[..., part[1]], weight[part], bias[part[0]] if has_bias else None
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    ours, torchs = products.linear(x, weight, bias), F.linear(x, weight, bias)
    torch.testing.assert_close(ours, torchs)
    grad = torch.randn(torchs.shape, generator=generator).transpose(0, -1).contiguous().transpose(0, -1)
    torch.testing.assert_close(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(torchs, inputs, grad))


def test_some_columns_of_a_weight_cost_no_more_than_their_copy():
    x, weight = torch.randn(256, 96), torch.randn(192, 192)[:, :96]

    def seconds(weight):
        started_s = time.perf_counter()
        products.linear(x, weight)
        return time.perf_counter() - started_s

    best = [min(seconds(way) for _ in range(5)) for way in (weight.contiguous(), weight)]
    assert best[1] < 20 * best[0]


def test_a_gradient_that_nobody_wants_is_not_computed():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(16, 8)
    products.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, 8))
    assert weight.grad is None


def test_without_gradients_the_operation_is_onednns():
    x, weight = torch.randn(4, 8), torch.randn(16, 8)
    with torch.profiler.profile() as profile:
        products.linear(x, weight)
    assert any("mkldnn" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_left_to_torch(dtype):
    x, weight = torch.randn(4, 8, dtype=dtype), torch.randn(16, 8, dtype=dtype)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
