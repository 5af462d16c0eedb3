import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dalle_lean.chunked_attention import chunked_attention, default_chunk


def dense_attention(query, key, value):
    """The slow, obvious twin: all scores at once."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ value


def inputs_of(*shape, dtype=torch.float64, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(*shape, generator=generator)).to(dtype).requires_grad_() for _ in range(3)]


def values_and_gradients(attention, inputs, grad, **options):
    out = attention(*inputs, **options)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


class Allocations(TorchDispatchMode):
    """Element counts of all tensors that operations allocate (views of others are not counted)."""

    def __init__(self):
        super().__init__()
        self.numels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple) else (result,)
        for returned, x in zip(func._schema.returns, results, strict=True):
            if isinstance(x, torch.Tensor) and returned.alias_info is None:
                self.numels.append(x.numel())
        return result


@pytest.mark.parametrize("chunk", [1, 5, 16, 64, None])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64, 131])
def test_values_and_gradients_are_those_of_dense_attention(length, chunk):
    inputs = inputs_of(2, 3, length, 8)
    grad = torch.randn(2, 3, length, 8, dtype=torch.float64)
    ours = values_and_gradients(chunked_attention, inputs, grad, chunk=chunk)
    theirs = values_and_gradients(dense_attention, inputs, grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_gradients_are_the_derivatives():
    assert torch.autograd.gradcheck(lambda *x: chunked_attention(*x, chunk=3), inputs_of(1, 2, 7, 3))


def test_float32_is_as_good_as_dense_float32():
    inputs = inputs_of(2, 3, 131, 16)
    grad = torch.randn(2, 3, 131, 16, dtype=torch.float64)
    exact = values_and_gradients(dense_attention, inputs, grad)
    single = [x.detach().float().requires_grad_() for x in inputs]
    ours = values_and_gradients(chunked_attention, single, grad, chunk=16)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() / b.norm() < 1e-6


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_loses_only_what_rounding_the_results_loses(autocast):
    inputs = inputs_of(2, 3, 131, 16, dtype=torch.bfloat16)
    grad = torch.randn(2, 3, 131, 16, dtype=torch.bfloat16)
    exact = values_and_gradients(dense_attention, [x.detach().double().requires_grad_() for x in inputs], grad)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        ours = values_and_gradients(chunked_attention, inputs, grad, chunk=16)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.bfloat16
        # Rounding a number moves it by 2^-9 of itself at most; gradients also see the rounded result.
        assert (a - b).norm() / b.norm() < 2**-8


def test_autocast_does_not_touch_float32():
    inputs = inputs_of(1, 2, 40, 8, dtype=torch.float32)
    grad = torch.randn(1, 2, 40, 8)
    plain = values_and_gradients(chunked_attention, inputs, grad, chunk=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = values_and_gradients(chunked_attention, inputs, grad, chunk=16)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_scores_too_large_for_exp_are_no_matter():
    inputs = inputs_of(1, 1, 50, 8, scale=100)
    grad = torch.randn(1, 1, 50, 8, dtype=torch.float64)
    ours = values_and_gradients(chunked_attention, inputs, grad, chunk=7)
    theirs = values_and_gradients(dense_attention, inputs, grad)
    assert inputs[0].detach().square().sum(-1).max() / math.sqrt(8) > 1000
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_query_does_not_see_later_keys():
    query, key, value = (x.detach() for x in inputs_of(1, 2, 40, 8))
    before = chunked_attention(query, key, value, chunk=16)
    key[:, :, 23:], value[:, :, 23:] = 7.0, math.nan
    after = chunked_attention(query, key, value, chunk=16)
    assert torch.equal(after[:, :, :16], before[:, :, :16])
    value[:, :, 23:] = 7.0
    assert torch.equal(chunked_attention(query, key, value, chunk=16)[:, :, :23], before[:, :, :23])


def test_heads_cut_out_of_one_projection_are_taken_as_they_are():
    qkv = torch.randn(2, 40, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    assert not query.is_contiguous()
    ours, theirs = chunked_attention(query, key, value, chunk=16), dense_attention(query, key, value)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    grad = torch.randn(2, 4, 8, 40, dtype=torch.float64).mT
    torch.testing.assert_close(
        torch.autograd.grad(ours, qkv, grad)[0], torch.autograd.grad(theirs, qkv, grad)[0], rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize(("length", "chunk"), [(64, 8), (256, 16), (256, None), (1024, None)])
def test_no_tensor_is_larger_than_one_tile_of_scores_and_one_result(length, chunk):
    batch, heads, size = 1, 2, 16
    inputs = inputs_of(batch, heads, length, size, dtype=torch.float32)
    grad = torch.randn(batch, heads, length, size)
    with Allocations() as allocations:
        values_and_gradients(chunked_attention, inputs, grad, chunk=chunk)
    side = chunk or default_chunk(length)
    assert max(allocations.numels) <= batch * heads * (side**2 + length * size)


def test_the_dispatch_counter_sees_dense_scores():
    inputs = inputs_of(1, 2, 256, 16, dtype=torch.float32)
    with Allocations() as allocations:
        values_and_gradients(dense_attention, inputs, torch.randn(1, 2, 256, 16))
    assert max(allocations.numels) == 2 * 256**2


def test_only_the_result_and_the_three_gradients_are_larger_than_a_tile():
    inputs = inputs_of(1, 2, 256, 16, dtype=torch.float32)
    grad = torch.randn(1, 2, 256, 16)
    with Allocations() as forward:
        out = chunked_attention(*inputs, chunk=16)
    with Allocations() as backward:
        torch.autograd.grad(out, inputs, grad)
    tile, result = 2 * 16 * 16, 2 * 256 * 16
    assert [numel for numel in forward.numels if numel > tile] == [result]
    assert [numel for numel in backward.numels if numel > tile] == 3 * [result]


def test_backward_keeps_the_inputs_the_result_and_one_number_per_query():
    inputs = inputs_of(1, 2, 100, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        chunked_attention(*inputs, chunk=16)
    assert sorted(kept) == [200, *4 * [3200]]


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (1280, 64), (4096, 64), (4097, 128), (8192, 128)])
def test_the_chunk_is_about_the_square_root_of_the_length(length, chunk):
    assert default_chunk(length) == chunk


def test_inputs_that_do_not_fit_are_named():
    query, key, value = inputs_of(1, 2, 10, 8)
    with pytest.raises(ValueError, match=r"\[1, 2, 9, 8\]"):
        chunked_attention(query, key[:, :, 1:], value)
    with pytest.raises(ValueError, match="float32"):
        chunked_attention(query, key, value.float())
    with pytest.raises(ValueError, match="chunk=0"):
        chunked_attention(query, key, value, chunk=0)
    with pytest.raises(ValueError, match=r"\[2, 10, 8\]"):
        chunked_attention(query[0], key[0], value[0])
