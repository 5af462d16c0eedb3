"""Sparse attention against dense attention with the same mask."""

import pytest
import torch

from dalle_lean import DalleConfig
from dalle_lean.model.attention import Layout, attend
from tests.dalle_lean.model.whole_mask import attention_mask

KINDS = [
    ("row", {}),
    ("column", {}),
    ("full", {}),
    ("conv", {"conv_kernel": 3}),
    ("conv", {"conv_kernel": 5}),
    ("conv", {"conv_kernel": 3, "conv_window": "corner"}),
    ("conv", {"conv_kernel": 5, "conv_window": "corner"}),
    ("conv", {"conv_kernel": 1}),
    ("conv", {"conv_kernel": 13}),
]


def heads(length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, 3, length, 6, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def dense(query, key, value, mask):
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("codes", [0, 1, 7, 24, 25])
@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_sparse_attention_is_dense_attention_with_the_mask(kind, fields, codes):
    config = DalleConfig(text_len=3, image_side=5, last_attention=kind, **fields)
    query, key, value = heads(4 + codes)
    mask = attention_mask(config, kind)[: 4 + codes, : 4 + codes]
    out, expected = attend(query, key, value, kind, Layout(config, 4, 5)), dense(query, key, value, mask)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
    ours = torch.autograd.grad(out, (query, key, value), upstream)
    theirs = torch.autograd.grad(expected, (query, key, value), upstream)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["row", "column", "conv"])
def test_weights_of_unseen_pairs_never_exist(kind):
    config = DalleConfig(text_len=3, image_side=16, last_attention=kind)
    seen = {}

    def pack(tensor):
        seen[tensor.data_ptr()] = tensor.numel()
        return tensor

    query, key, value = heads(4 + 256)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(query, key, value, kind, Layout(config, 4, 16))
    window = 16 if kind != "conv" else 3 * 16
    assert max(seen.values()) <= 2 * 3 * 256 * max(4 + window, 3 * 6)
    assert max(seen.values()) < 2 * 3 * 260 * 260 / 4


def test_full_attention_saves_memory_linear_in_the_length():
    config, seen = DalleConfig(text_len=3, image_side=16), []

    def pack(tensor):
        seen.append(tensor.numel())
        return tensor

    query, key, value = heads(4 + 256)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(query, key, value, "full", Layout(config, 4, 16))
    assert max(seen) <= query.numel()
