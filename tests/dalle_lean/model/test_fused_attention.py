"""Fused attention against the attention that computes the scores of each window."""

import pytest
import torch

from dalle_lean import Dalle, DalleConfig, MemoryPlan
from dalle_lean.memory import TrainingSetup, cost_of
from dalle_lean.model import fused_attention
from dalle_lean.model.attention import Layout, attend
from tests.fake_cuda import fake_cuda
from tests.tiny import DALLE_FIELDS

KINDS = [("row", {}), ("column", {}), ("conv", {"conv_kernel": 5}), ("conv", {"conv_window": "corner"})]


def heads(length, device="cpu"):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, 3, length, 16, generator=generator).to(device).requires_grad_() for _ in range(3)]


@pytest.fixture
def uncompiled(monkeypatch):
    """The kernel as torch computes it without its compiler."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(fused_attention, "kernel", lambda: flex.flex_attention)


@pytest.mark.filterwarnings("ignore:.*called without torch.compile")
@pytest.mark.parametrize("codes", [0, 1, 100, 255])
@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_the_kernel_gets_the_pairs_of_each_kind(kind, fields, codes, uncompiled):
    config = DalleConfig(text_len=8, image_side=16, last_attention=kind, **fields)
    inputs = [x.detach() for x in heads(9 + codes)]
    expected = attend(*inputs, kind, Layout(config, 9, 16))
    torch.testing.assert_close(attend(*inputs, kind, Layout(config, 9, 16, fused=True)), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "fields"), KINDS)
def test_values_and_gradients_on_a_gpu(kind, fields):
    config = DalleConfig(text_len=8, image_side=16, last_attention=kind, **fields)
    inputs = heads(9 + 255, "cuda")
    upstream = torch.randn_like(inputs[0])
    results = []
    for fused in (False, True):
        out = attend(*inputs, kind, Layout(config, 9, 16, "cuda", fused=fused))
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])
    torch.testing.assert_close(*results, atol=5e-3, rtol=5e-3)


def test_a_plan_asks_for_it_on_a_gpu_only():
    config = DalleConfig(**DALLE_FIELDS)
    with fake_cuda(), torch.enable_grad():
        for device, fused in (("cuda", True), ("cpu", False)):
            model = Dalle(config, MemoryPlan(activations="keep", fused_attention=True), device=device)
            layout = model.layout(config.sequence_len, torch.float32, torch.device(device))
            assert layout.fused == fused


def test_it_keeps_no_scores():
    config, setup = DalleConfig.paper(), TrainingSetup.of_precision("bf16", batch=4, device="cuda")
    eager, fused = (
        cost_of(config, MemoryPlan(activations="keep", fused_attention=fused), setup).device.activations
        for fused in (False, True)
    )
    scores = 4 * config.num_heads * config.image_len * (config.num_text_positions + config.image_side)
    assert eager - fused > config.num_layers * scores * (2 + 4)  # the softmax in float32 and in bfloat16
