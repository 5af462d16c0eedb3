"""Branch scales let float16 train where one loss scale underflows."""

import pytest
import torch

from dalle_lean import Dalle, DalleConfig, MemoryPlan
from dalle_lean.model.grad_scales import BranchScales

DEEP = {
    "text_vocab_size": 20,
    "text_len": 4,
    "image_vocab_size": 20,
    "image_side": 4,
    "hidden_size": 16,
    "num_layers": 28,
    "num_heads": 2,
    "head_size": 8,
    "shared_blocks": None,
}


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 20, (2, 4), generator=generator), torch.randint(0, 20, (2, 16), generator=generator)


def gradients(model, dtype=None, loss_scale=1.0, scales=None):
    """Of the matrices of the first layers and of the last ones, in one vector each."""
    model.zero_grad()
    model.scales = scales
    with torch.autocast("cpu", dtype or torch.float16, enabled=dtype is not None):
        loss = model.loss(*batch())
    (loss * loss_scale).backward()
    return [
        torch.cat([p.grad.flatten() for block in blocks for p in block.parameters()]) / loss_scale
        for blocks in (model.blocks[:4], model.blocks[-4:])
    ]


def scales_of(count, value):
    scales = BranchScales(count)
    scales.values = [value] * count
    return scales


def error(ours, exact):
    return float((ours - exact).norm() / exact.norm())


@pytest.fixture
def deep():
    torch.manual_seed(0)
    return Dalle(DalleConfig(**DEEP), MemoryPlan(feed_forward_tokens=20))


def settled(model, first=2.0**18):
    """Scales after the first step that nothing overflowed in."""
    scales = scales_of(2 * model.config.num_layers, first)
    for _ in range(24):
        gradients(model, torch.float16, scales=scales)
        if scales.update():
            break
    return scales


def test_with_branch_scales_float16_has_the_gradients_of_deep_layers(deep):
    """LayerScale starts at 1e-6 past layer 24: what enters those branches is below float16's smallest number."""
    exact = gradients(deep)
    without = gradients(deep, torch.float16)
    scaled = gradients(deep, torch.float16, scales=settled(deep))
    assert error(without[0], exact[0]) < 0.02
    assert error(without[1], exact[1]) > 0.5
    assert error(scaled[0], exact[0]) < 0.02
    assert error(scaled[1], exact[1]) < 0.02


@pytest.mark.slow
def test_no_single_loss_scale_does_it(deep):
    """Where LayerScale spreads over nine decades. Over the five of its start, a loss scale of 2^10 would do."""
    for index, layer in enumerate(deep.layers):
        for branch in (layer.attention, layer.feed_forward):
            branch.scale.data.fill_(1.0 if index < 4 else 1e-9)
    exact = gradients(deep)
    scaled = gradients(deep, torch.float16, scales=settled(deep, 2.0**24))
    assert max(map(error, scaled, exact)) < 0.05
    for power in range(0, 48, 2):
        ours = gradients(deep, torch.float16, loss_scale=2.0**power)
        finite = all(gradient.isfinite().all() for gradient in ours)
        assert not finite or max(map(error, ours, exact)) > 0.05, f"2^{power} does"


def test_an_overflow_halves_the_scale_of_its_branch_alone_and_calls_the_step_off(deep):
    scales = scales_of(56, 2.0)
    scales.values[5] = 2.0**40
    gradients(deep, torch.float16, scales=scales)
    assert not scales.update()
    assert scales.values[5] == 2.0**39
    assert all(value > 2 for branch, value in enumerate(scales.values) if branch != 5)


def test_what_follows_an_overflow_in_backward_stays_finite(deep):
    scales = scales_of(56, 2.0)
    scales.values[5] = 2.0**40
    first, _ = gradients(deep, torch.float16, scales=scales)
    assert first.isfinite().all()


def test_scales_go_through_a_checkpoint():
    scales, restored = scales_of(4, 8.0), BranchScales(4)
    scales.values[2] = 64.0
    restored.load_state_dict(scales.state_dict())
    assert restored.values == scales.values
    with pytest.raises(ValueError, match="3 gradient scales: this model needs 4"):
        restored.load_state_dict({"values": [1.0, 1.0, 1.0]})


def test_scales_where_they_would_do_nothing_are_refused(deep):
    deep.plan = MemoryPlan(activations="keep")
    with pytest.raises(ValueError, match="they need checkpoint or reversible"):
        gradients(deep, scales=BranchScales(56))
