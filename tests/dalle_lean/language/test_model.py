"""The text decoder: no plan changes it, positions are what they should be, and its memory is predicted."""

import dataclasses
import math

import pytest
import torch

from benchmarks.allocations import step_bytes
from dalle_lean import MemoryPlan
from dalle_lean.language import LanguageConfig, LanguageModel
from dalle_lean.language.model import text_angles
from dalle_lean.memory import TrainingSetup, cost_of, fastest_plan
from dalle_lean.memory.parameters import parameter_sizes
from dalle_lean.memory.published_models import gpt
from dalle_lean.memory.shape_cost import shape_cost
from dalle_lean.model.grad_scales import BranchScales
from dalle_lean.model.rope import rotary_table, rotate

TINY = LanguageConfig(text_vocab_size=30, text_len=10, hidden_size=24, num_layers=4, num_heads=3, head_size=8)
VARIANTS = {
    "gpt2": {},
    "rotary": {"rotary": True},
    "geglu": {"ffn_gated": True, "ffn_activation": "gelu"},
    "untied": {"tie_embeddings": False},
    "shared": {"shared_blocks": 2},
    "reversible": {"reversible": True, "rotary": True, "shared_blocks": 1},
}
CHUNKS = {"samples": 1, "attention_heads": 2, "feed_forward_tokens": 7, "loss_tokens": 3}
KEPT = MemoryPlan(activations="keep", loss_tokens=None)
LEAN = MemoryPlan(**CHUNKS, grads_in_place=True)


def model_of(dtype=torch.float64, **fields):
    torch.manual_seed(0)
    model = LanguageModel(dataclasses.replace(TINY, **fields), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def random_ids(length=11, batch=2):
    return torch.randint(TINY.text_vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def results(model, plan, autocast=None, scales=None):
    """The loss, and the gradient of every parameter in one vector."""
    model.plan, model.scales = plan, scales
    model.zero_grad()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model.loss(random_ids())
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def relative_error(ours, kept):
    return float((ours[1] - kept[1]).norm() / kept[1].norm())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_plan_gives_the_loss_and_gradients_of_the_plain_model(variant):
    model = model_of(**VARIANTS[variant])
    kept = results(model, KEPT)
    reversible = model.config.reversible
    for activations in ("keep", "reversible") if reversible else ("keep", "selective", "checkpoint"):
        for chunks in ({"loss_tokens": None}, CHUNKS, {**CHUNKS, "grads_in_place": True}):
            ours = results(model, MemoryPlan(activations=activations, **chunks))
            torch.testing.assert_close(ours[0], kept[0], rtol=1e-10, atol=0)
            torch.testing.assert_close(ours[1], kept[1], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_autocast_keeps_the_gradients_direction_under_every_plan(variant, dtype, bound):
    model = model_of(torch.float32, **VARIANTS[variant])
    exact = results(model, KEPT)
    for plan in (KEPT, LEAN):
        ours = results(model, plan, autocast=dtype)
        assert bound / 100 < relative_error(ours, exact) < bound
        assert abs(float(ours[0] - exact[0])) < bound


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_of_bfloat16_have_float32_streams_and_gradients_near_the_float32_ones(variant):
    model = model_of(torch.float32, **VARIANTS[variant])
    exact = results(model, KEPT)
    model.bfloat16()
    assert model(random_ids(10)).dtype == torch.bfloat16
    assert model.hidden(random_ids(10)).dtype == torch.float32
    for plan in (KEPT, LEAN):
        ours = results(model, plan)
        assert ours[0].dtype == torch.float32
        assert 1e-4 < relative_error(ours, exact) < 0.03


@pytest.mark.parametrize("variant", ["gpt2", "rotary"])
def test_residual_streams_have_the_dtype_of_the_plan(variant):
    model = model_of(torch.float32, num_layers=32, **VARIANTS[variant])
    exact = results(model, KEPT)
    for activations in ("keep", "selective", "checkpoint"):
        narrow = MemoryPlan(activations=activations, residual_dtype="bfloat16")
        assert 1e-4 < relative_error(results(model, narrow), exact) < 0.1
        wide = MemoryPlan(activations=activations, residual_dtype="float64")
        assert relative_error(results(model, wide), exact) < 1e-4


def test_reversible_backward_refuses_streams_that_it_could_not_rebuild():
    with pytest.raises(ValueError, match="residual_dtype='bfloat16'"):
        model_of(reversible=True).plan = MemoryPlan(residual_dtype="bfloat16")


@pytest.mark.parametrize("variant", ["gpt2", "reversible"])
def test_with_branch_scales_float16_has_the_gradients_of_branches_that_barely_count(variant):
    """What enters a branch of scale 1e-7 is below float16's smallest number."""
    model = model_of(torch.float32, **VARIANTS[variant])
    for layer in model.layers:
        for branch in (layer.attention, layer.feed_forward):
            branch.scale.data.fill_(1e-7)

    def of_blocks(found):
        sizes = [parameter.numel() for parameter in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        parts = zip(names, found[1].split(sizes), strict=True)
        return found[0], torch.cat([part for name, part in parts if name.startswith("blocks.")])

    exact = of_blocks(results(model, KEPT))
    assert relative_error(of_blocks(results(model, LEAN, torch.float16)), exact) > 0.3
    scales = BranchScales(2 * TINY.num_layers)
    scales.values = [2.0**20] * scales.count
    scaled = of_blocks(results(model, LEAN, torch.float16, scales))
    assert scales.update()
    assert relative_error(scaled, exact) < 0.003


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_the_cross_entropy_of_the_logits_and_no_token_sees_the_next(variant):
    model, ids = model_of(**VARIANTS[variant]), random_ids()
    logits = model(ids[:, :-1])
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(model.loss(ids), wanted)
    changed = ids[:, :-1].clone()
    changed[:, 6] = (changed[:, 6] + 1) % TINY.text_vocab_size
    torch.testing.assert_close(model(changed)[:, :6], logits[:, :6], rtol=0, atol=0)
    assert not torch.allclose(model(changed)[:, 6:], logits[:, 6:])


def test_rotary_scores_depend_on_the_distance_alone_and_values_stay():
    query, key, value = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = rotary_table(text_angles(10, 8, torch.device("cpu")).double(), torch.float64)
    everywhere = torch.stack([query, key, value])[:, None, None, None].expand(3, 1, 1, 10, 8)
    queries, keys, values = rotate(everywhere, table)[:, 0, 0]
    scores = queries @ keys.T
    torch.testing.assert_close(scores[3:, 3:], scores[:-3, :-3], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scores[0, 0], scores[0, 1])
    torch.testing.assert_close(values, value.expand(10, 8))


def test_it_learns_a_sentence_by_heart():
    model = model_of(torch.float32, reversible=True, rotary=True)
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), random_ids(batch=1)
    assert model.loss(ids) > 0.5 * math.log(TINY.text_vocab_size)
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(ids).backward()
        optimizer.step()
    assert model.loss(ids) < 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_its_parameters_are_counted_exactly(variant):
    config = dataclasses.replace(TINY, **VARIANTS[variant])
    counted = sorted(parameter.numel() for parameter in LanguageModel(config).parameters())
    assert sorted(parameter_sizes(config)) == counted


SMALL = LanguageConfig(text_vocab_size=1000, text_len=128, hidden_size=128, num_layers=4, num_heads=4, head_size=32)


@pytest.mark.parametrize(
    ("fields", "plan"),
    [
        ({}, {"activations": "keep", "loss_tokens": None}),
        ({"rotary": True}, {"activations": "keep", "loss_tokens": 64}),
        ({}, {"activations": "selective"}),
        ({}, {"activations": "checkpoint", "samples": 1, "loss_tokens": 64, "grads_in_place": True}),
        ({"reversible": True}, {"activations": "reversible", "loss_tokens": None}),
        ({"reversible": True}, {"activations": "reversible", "samples": 1, "loss_tokens": 64, "grads_in_place": True}),
        ({}, {"activations": "selective", "residual_dtype": "bfloat16"}),
    ],
)
@pytest.mark.parametrize(("precision", "batch"), [("fp32", 1), ("fp32", 8), ("bf16", 2), ("bf16-weights", 1)])
def test_it_needs_the_memory_that_is_predicted(fields, plan, precision, batch):
    config, plan = dataclasses.replace(SMALL, **fields), MemoryPlan(**plan)
    setup = TrainingSetup.of_precision(precision, batch=batch, device="cpu")
    predicted = dataclasses.replace(cost_of(config, plan, setup).device, optimizer_state=0).total
    assert predicted == pytest.approx(measured_bytes(config, plan, setup), rel=0.05)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_reversible_shape_is_priced_as_this_model_runs_it(batch):
    shape = dataclasses.replace(gpt(4, 128, 4, tokens=128), vocabulary=1000)
    cost = shape_cost(shape, MemoryPlan(activations="reversible"), TrainingSetup(batch=batch, device="cpu"))
    plan = MemoryPlan(activations="reversible", loss_tokens=None, grads_in_place=True)
    measured = measured_bytes(dataclasses.replace(SMALL, reversible=True), plan, TrainingSetup(batch=batch))
    assert dataclasses.replace(cost.device, optimizer_state=0).total == pytest.approx(measured, rel=0.05)


def measured_bytes(config, plan, setup):
    """Weights, gradients and the peak of a step."""
    model = LanguageModel(config, plan, dtype=getattr(torch, setup.weight_dtype))
    ids = torch.randint(config.text_vocab_size, (setup.batch, config.text_len + 1))
    autocast = getattr(torch, setup.compute_dtype or "bfloat16")

    def loss():
        with torch.autocast("cpu", autocast, enabled=setup.compute_dtype is not None):
            return model.loss(ids)

    weights = sum(parameter.nbytes for parameter in model.parameters())
    return 2 * weights + step_bytes(loss, model.parameters()).peak_bytes


def test_a_plan_is_found_for_a_budget():
    setup = TrainingSetup(batch=8)
    most = cost_of(SMALL, MemoryPlan(activations="keep", loss_tokens=None), setup).peak_bytes
    plan = fastest_plan(SMALL, setup, 0.5 * most)
    assert cost_of(SMALL, plan, setup).peak_bytes <= 0.5 * most


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.zeros(2, 11, dtype=torch.long), r"\[2, 11\].*1..10"),
        (torch.zeros(0, 4, dtype=torch.long), "at least 1"),
        (torch.full((1, 4), 30), "value 30"),
        (torch.zeros(1, 4), "float32"),
    ],
)
def test_ids_that_it_cannot_have_are_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        model_of()(ids)
    with pytest.raises(ValueError, match="1 tokens a sample"):
        model_of().loss(torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="value 30"):
        model_of().loss(torch.tensor([[1, 30]]))


def test_a_config_with_a_picture_is_refused():
    for fields in ({"image_side": 4}, {"attention_pattern": ("row",)}, {"token_shift": True}):
        with pytest.raises(ValueError, match="no picture"):
            dataclasses.replace(TINY, **fields)
