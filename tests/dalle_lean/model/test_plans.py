"""No plan changes loss or gradients beyond rounding."""

import itertools
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from dalle_lean import MemoryPlan
from dalle_lean.model.dalle import Crop
from tests.tiny import tiny_batch as batch
from tests.tiny import tiny_dalle

CHUNKS = {"samples": 2, "attention_heads": 2, "feed_forward_tokens": 7, "loss_tokens": 5, "grads_in_place": True}
KEPT = MemoryPlan(activations="keep", loss_tokens=None)


def plans(activations, every):
    """Every combination of whole and chunked, or eight of the five in which every two meet in all four ways."""
    names = list(CHUNKS) if activations in ("reversible", "checkpoint") else ["loss_tokens", "grads_in_place"]
    combinations = itertools.product((False, True), repeat=len(names))
    if len(names) == 5 and not every:
        combinations = ((a, b, c, a != b, a != c) for a, b, c in itertools.product((False, True), repeat=3))
    for chosen in combinations:
        chunks = {name: CHUNKS[name] for name, chunked in zip(names, chosen, strict=True) if chunked}
        yield MemoryPlan(activations=activations, **{"loss_tokens": None, **chunks})


def tiny(dtype=torch.float64, **fields):
    return tiny_dalle(dtype=dtype, **fields)


def results(model, plan, crop=None, autocast=None, backwards=1):
    """The loss, and the gradient of every parameter in one vector."""
    model.plan = plan
    model.zero_grad()
    for _ in range(backwards):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = model.loss(*batch(), crop)
        loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def assert_same(ours, kept):
    torch.testing.assert_close(ours[0], kept[0], rtol=1e-10, atol=0)
    torch.testing.assert_close(ours[1], kept[1], rtol=1e-7, atol=1e-12)


def relative_error(ours, kept):
    return float((ours[1] - kept[1]).norm() / kept[1].norm())


VARIANTS = {
    "paper": {},
    "plain": {"reversible": False},
    "sandwich": {"sandwich_norm": True, "shared_blocks": None},
    "full": {"attention_pattern": ("full", "row"), "last_attention": None, "shared_blocks": (0, 1, 0, 1, 0)},
    "one block": {"attention_pattern": ("row",), "last_attention": None, "shared_blocks": 1},
    "untied": {"tie_embeddings": False, "rotary": False, "token_shift": False, "reversible": False},
    "ungated": {"ffn_gated": False, "ffn_activation": "relu_squared"},
    "pixelfly": {"pixelfly_rank": 4, "pixelfly_block_size": 8, "pixelfly_butterfly_size": 2, "num_heads": 4},
}


@pytest.mark.parametrize(
    ("variant", "every"),
    [*((variant, False) for variant in VARIANTS)]
    + [pytest.param(variant, True, marks=pytest.mark.slow) for variant in ("paper", "plain")],
)
def test_every_plan_gives_the_loss_and_gradients_of_the_plain_model(variant, every):
    model = tiny(**VARIANTS[variant])
    kept = results(model, KEPT)
    allowed = ("keep", "reversible") if model.config.reversible else ("keep", "selective", "checkpoint")
    for plan in itertools.chain.from_iterable(plans(each, every) for each in allowed):
        try:
            assert_same(results(model, plan), kept)
        except AssertionError as error:
            raise AssertionError(f"{plan}: {error}") from None


@pytest.mark.parametrize("variant", ["paper", "plain"])
@pytest.mark.parametrize("crop", [Crop(3, 2), Crop(6, 3, row=1, column=0), Crop(1, 1, row=3, column=3)])
def test_every_plan_agrees_on_a_cropped_sample(variant, crop):
    model = tiny(**VARIANTS[variant])
    kept = results(model, KEPT, crop)
    assert_same(results(model, MemoryPlan(**CHUNKS), crop), kept)


@pytest.mark.parametrize("variant", ["paper", "plain", "pixelfly"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_second_backward_adds_to_the_first(variant, in_place):
    model = tiny(**VARIANTS[variant])
    once = results(model, KEPT)
    twice = results(model, MemoryPlan(grads_in_place=in_place, feed_forward_tokens=5), backwards=2)
    torch.testing.assert_close(twice[1], 2 * once[1], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("variant", ["paper", "plain", "pixelfly"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_autocast_keeps_the_gradients_direction_under_every_plan(variant, dtype, bound):
    """Streams, LayerNorm, softmax, rotary and loss stay float32; only the projections are rounded."""
    model = tiny(torch.float32, **VARIANTS[variant])
    exact = results(model, KEPT)
    kept = results(model, KEPT, autocast=dtype)
    lean = results(model, MemoryPlan(**CHUNKS), autocast=dtype)
    assert bound / 100 < relative_error(kept, exact) < bound
    assert bound / 100 < relative_error(lean, exact) < bound
    assert abs(float(lean[0] - exact[0])) < bound


@pytest.mark.parametrize("variant", ["paper", "plain", "pixelfly"])
def test_low_precision_weights_have_float32_streams_and_gradients_near_the_float32_ones(variant):
    exact = results(tiny(torch.float32, **VARIANTS[variant]), KEPT)
    model = tiny(torch.float32, **VARIANTS[variant]).bfloat16()
    assert model(*batch()).dtype == torch.bfloat16
    for plan in (KEPT, MemoryPlan(**CHUNKS)):
        ours = results(model, plan)
        assert ours[0].dtype == torch.float32
        assert 1e-4 < relative_error(ours, exact) < 0.03


def test_residual_streams_of_bfloat16_are_a_choice():
    model = tiny(torch.float32, num_layers=16, reversible=False)
    exact = results(model, KEPT)
    for activations in ("keep", "checkpoint"):
        plan = MemoryPlan(activations=activations, residual_dtype="bfloat16")
        assert 1e-4 < relative_error(results(model, plan), exact) < 0.1


def test_reversible_backward_refuses_streams_that_it_could_not_rebuild():
    with pytest.raises(ValueError, match="residual_dtype='bfloat16'"):
        tiny(torch.float32).plan = MemoryPlan(residual_dtype="bfloat16")


def test_rebuilt_inputs_do_not_drift_over_64_layers():
    model = tiny(torch.float32, num_layers=64)
    assert relative_error(results(model, MemoryPlan()), results(model, KEPT)) < 1e-4


@pytest.mark.parametrize("variant", ["paper", "plain"])
def test_gradients_in_place_survive_an_outer_checkpoint(variant):
    model = tiny(**VARIANTS[variant])
    kept = results(model, KEPT)
    model.plan = MemoryPlan(**CHUNKS)
    model.zero_grad()
    torch.utils.checkpoint.checkpoint(model.loss, *batch(), use_reentrant=False).backward()
    grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(grads, kept[1], rtol=1e-7, atol=1e-12)


def test_without_gradients_no_branch_input_outlives_its_branch():
    model, (text, codes) = tiny(torch.float32, num_layers=16, reversible=False), batch()
    streams = []

    class CountStreams(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.clone.default:
                streams.append(weakref.ref(out))
                most.append(sum(stream() is not None for stream in streams))
            return out

    most = [0]
    with torch.no_grad(), CountStreams():
        model.loss(text, codes)
    assert max(most) <= 4


@pytest.mark.parametrize("activations", ["keep", "reversible"])
def test_frozen_weights_and_an_input_without_gradient(activations):
    model = tiny(tie_embeddings=False)
    model.plan = MemoryPlan(activations=activations)
    model.embedding.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.layers[0].attention.scale.requires_grad_(False)
    model.loss(*batch()).backward()
    assert model.blocks[0].attention.qkv.weight.grad.abs().sum() > 0
    assert model.blocks[1].attention.qkv.weight.grad is None
    assert model.layers[0].attention.scale.grad is None


def test_gradients_of_a_plan_that_returns_them_can_be_asked_for_by_name():
    model = tiny()
    kept = results(model, KEPT)
    model.plan, parameters = MemoryPlan(feed_forward_tokens=4), list(model.parameters())
    grads = torch.autograd.grad(model.loss(*batch()), parameters)
    torch.testing.assert_close(torch.cat([grad.flatten() for grad in grads]), kept[1], rtol=1e-7, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["paper", "plain"])
def test_torch_compile_goes_around_every_plan(variant):
    model = tiny(**VARIANTS[variant])
    kept = results(model, KEPT)
    for plan in (KEPT, MemoryPlan()):
        model.plan = plan
        model.zero_grad()
        text, image = torch.compile(model.losses, backend="aot_eager")(*batch())
        ((text + 7 * image) / 8).backward()
        grads = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        torch.testing.assert_close(grads, kept[1], rtol=1e-7, atol=1e-12)
        torch.compiler.reset()


def test_a_crop_outside_the_sample_is_refused():
    for crop in (Crop(7, 4), Crop(0, 4), Crop(6, 5), Crop(6, 3, row=2), Crop(6, 3, column=-1), Crop(6, 0)):
        with pytest.raises(ValueError, match="must lie in 6 caption ids and 4 x 4 codes"):
            tiny().loss(*batch(), crop)


def test_a_crop_of_everything_is_everything():
    model = tiny()
    torch.testing.assert_close(model.loss(*batch(), Crop(6, 4)), model.loss(*batch()))


def test_a_crop_keeps_positions():
    """With row attention alone, what stands below the last row of a crop changes nothing in the rows above."""
    model = tiny(attention_pattern=("row",), last_attention=None, shared_blocks=1)
    text, codes = batch()
    other = codes.clone()
    other[:, 8:] = (other[:, 8:] + 1) % 40
    torch.testing.assert_close(model.loss(text, codes, Crop(6, 2)), model.loss(text, other, Crop(6, 2)))


def test_a_second_backward_through_streams_that_are_undone_is_refused():
    model = tiny()
    loss = model.loss(*batch())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again first"):
        loss.backward()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_branch_draws_random_numbers_which_computing_it_again_would_change(variant):
    model = tiny(**VARIANTS[variant])
    before = torch.get_rng_state()
    results(model, MemoryPlan())
    assert torch.equal(torch.get_rng_state(), before)
