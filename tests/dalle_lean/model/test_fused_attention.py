"""Fused attention against the attention that computes the scores of each window."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dalle_lean import Dalle, DalleConfig, MemoryPlan, devices
from dalle_lean.memory import TrainingSetup, cost_of
from dalle_lean.memory.operations import Step, attention_chain
from dalle_lean.model import fused_attention
from dalle_lean.model.attention import Layout, attend
from tests.fake_cuda import fake_cuda
from tests.tiny import DALLE_FIELDS

KINDS = [("row", {}), ("column", {}), ("conv", {"conv_kernel": 5}), ("conv", {"conv_window": "corner"})]


def heads(length, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, 3, length, 16, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]


@pytest.fixture
def uncompiled(monkeypatch):
    """The kernel as torch computes it without its compiler."""
    monkeypatch.setattr(fused_attention, "kernel", lambda: flex_attention)
    # torch refuses a gradient on a CPU, which its kernel lacks; without the compiler it can compute one.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.fixture
def fused_on_a_cpu(uncompiled, monkeypatch):
    monkeypatch.setattr(MemoryPlan, "fuses_attention", lambda plan, config, device, compute_bytes: plan.fused_attention)


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
    inputs = heads(9 + 255, "cuda", torch.bfloat16)
    upstream = torch.randn_like(inputs[0])
    results = []
    for fused in (False, True):
        out = attend(*inputs, kind, Layout(config, 9, 16, "cuda", fused=fused))
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])
    torch.testing.assert_close(*results, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"activations": "keep"},
        {"activations": "selective"},
        {"activations": "checkpoint", "samples": 2, "attention_heads": 2},
        {"activations": "reversible", "samples": 2},
    ],
    ids=lambda settings: settings["activations"],
)
def test_a_model_learns_the_same_under_every_plan_on_a_gpu(settings, compiled):
    reversible = settings["activations"] == "reversible"
    config = DalleConfig(**{**DALLE_FIELDS, "head_size": 16, "reversible": reversible})
    torch.manual_seed(0)
    model = Dalle(config, device="cuda")
    text_ids = torch.randint(1, config.text_vocab_size, (3, config.text_len), device="cuda")
    codes = torch.randint(config.image_vocab_size, (3, config.image_len), device="cuda")
    results = []
    for fused in (False, True):
        model.plan = MemoryPlan(**settings, fused_attention=fused)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.weigh(*(torch.compile(model.losses) if compiled else model.losses)(text_ids, codes))
        loss.backward()
        results.append([loss.detach(), torch.cat([weight.grad.flatten() for weight in model.parameters()])])
    (loss, gradient), (fused_loss, fused_gradient) = results
    torch.testing.assert_close(fused_loss, loss, atol=1e-2, rtol=1e-2)
    assert (fused_gradient - gradient).norm() < 0.05 * gradient.norm()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*called without torch.compile")
def test_a_compiled_model_learns_the_same_with_it(fused_on_a_cpu):
    config = DalleConfig(**DALLE_FIELDS)
    torch.manual_seed(0)
    model = Dalle(config)
    text_ids = torch.randint(1, config.text_vocab_size, (2, config.text_len))
    codes = torch.randint(config.image_vocab_size, (2, config.image_len))
    results, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    for fused in (False, True):
        model.plan = MemoryPlan(activations="keep", fused_attention=fused)
        losses = torch.compile(model.losses, backend=backend) if fused else model.losses
        loss = model.weigh(*losses(text_ids, codes))
        results.append((loss.detach(), torch.autograd.grad(loss, list(model.parameters()))))
    torch.testing.assert_close(*results)
    assert graphs
    assert not any("flex_attention" in graph for graph in graphs), "its mask would be lost in a larger graph"


@pytest.mark.parametrize(
    ("device", "head_size", "precision", "fused"),
    [
        ("cuda", 16, torch.bfloat16, True),
        ("cuda", 8, torch.bfloat16, False),
        ("cuda", 16, torch.float32, False),
        ("cpu", 16, torch.bfloat16, False),
    ],
)
def test_large_16_bit_heads_on_a_gpu_are_fused(device, head_size, precision, fused):
    config = DalleConfig(**{**DALLE_FIELDS, "head_size": head_size})
    with fake_cuda():
        model = Dalle(config, MemoryPlan(activations="keep", fused_attention=True), device=device, dtype=precision)
        layout = model.layout(config.sequence_len, torch.float32, torch.device(device))
    assert layout.fused == fused


def test_more_shapes_than_torch_compiles_by_default_run_compiled(monkeypatch):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend="eager", **options))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 3)
    fused_attention.kernel.cache_clear()
    config = DalleConfig(text_len=8, image_side=16)
    try:
        for codes in range(6):
            inputs = [x.detach() for x in heads(9 + codes)]
            expected = attend(*inputs, "row", Layout(config, 9, 16))
            torch.testing.assert_close(attend(*inputs, "row", Layout(config, 9, 16, fused=True)), expected)
    finally:
        fused_attention.kernel.cache_clear()
        torch.compiler.reset()


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"capability": (7, 5)}, False),
        ({"programs": ("cc",)}, False),
        ({"programs": ("clang",)}, True),
        ({"CC": "gcc-13", "programs": ()}, True),
        ({"CC": ""}, False),
        ({"triton": None}, False),
        ({"headers": "/nowhere"}, False),
    ],
)
def test_it_runs_where_triton_finds_what_it_needs(changes, runs, tmp_path, monkeypatch):
    (tmp_path / "Python.h").touch()
    found = {"capability": (8, 0), "programs": ("gcc",), "CC": None, "triton": object(), "headers": tmp_path, **changes}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found["capability"])
    monkeypatch.setattr(devices, "which", lambda name: name if name in found["programs"] else None)
    monkeypatch.setattr(devices, "find_spec", lambda _: found["triton"])
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(found["headers"])})
    monkeypatch.delenv("CC", raising=False)
    if found["CC"] is not None:
        monkeypatch.setenv("CC", found["CC"])
    assert devices.fused_attention_runs.__wrapped__(torch.device("cuda")) == runs
    assert not devices.fused_attention_runs.__wrapped__(torch.device("cpu"))


def cost(kind, fused, device="cuda"):
    config = DalleConfig(attention_pattern=(kind,), last_attention=None, shared_blocks=None, num_layers=4)
    setup = TrainingSetup.of_precision("bf16", batch=4, device=device)
    plan = MemoryPlan(activations="keep", loss_tokens=64, grads_in_place=True, fused_attention=fused)
    return cost_of(config, plan, setup)


def test_it_keeps_no_scores_and_computes_them_again():
    config, ours, windowed = DalleConfig.paper(), cost("row", fused=True), cost("row", fused=False)
    scores = 4 * config.num_heads * config.image_len * (config.num_text_positions + config.image_side)
    softmax = 2 + 4  # in bfloat16 and in float32
    assert windowed.device.activations - ours.device.activations > 3 * scores * softmax
    assert ours.step.attention > windowed.step.attention


def test_columns_are_reordered_and_rows_are_not():
    setup = TrainingSetup.of_precision("bf16", batch=4, device="cuda")
    step = Step(DalleConfig(), MemoryPlan(fused_attention=True), setup)
    columns, rows = (attention_chain(step, kind, 4, 16, recomputed=False) for kind in ("column", "row"))
    values = 4 * step.config.sequence_len * 16 * step.config.head_size * step.compute
    assert sum(op.output_bytes for op in columns) - sum(op.output_bytes for op in rows) == (3 + 1) * values


def test_a_cpu_has_no_such_kernel():
    assert cost("row", fused=True, device="cpu").device == cost("row", fused=False, device="cpu").device
