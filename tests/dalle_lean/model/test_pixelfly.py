import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear

from dalle_lean.model.pixelfly import PixelFly, pixelfly_parameters

SHAPES = [
    pytest.param({"in_features": 16, "out_features": 16, "butterfly_size": 8, "rank": 3}, id="square"),
    pytest.param({"in_features": 8, "out_features": 24, "butterfly_size": 4, "rank": 2}, id="wide"),
    pytest.param({"in_features": 24, "out_features": 8, "butterfly_size": 4, "rank": 2}, id="narrow"),
    pytest.param({"in_features": 24, "out_features": 24, "butterfly_size": 4, "rank": 0}, id="three butterflies"),
    pytest.param({"in_features": 8, "out_features": 8, "butterfly_size": 1, "rank": 0}, id="diagonal"),
    pytest.param({"in_features": 6, "out_features": 6, "butterfly_size": 1, "rank": 6, "bias": False}, id="no bias"),
]


def layer_of(sizes, block_size=2, **options):
    torch.manual_seed(0)
    return PixelFly(**sizes, block_size=block_size, **options)


def dense_weight(layer):
    """The weight of the linear layer that computes the same, [out, in]."""
    n, repeat_in, repeat_out, strides = layer.pattern
    index = torch.arange(n)
    grid = layer.blocks.new_zeros(n, n, *layer.blocks.shape[2:])  # [output block, input block, r b, R b]
    for stride, blocks in zip(strides, layer.blocks, strict=True):
        grid[index ^ stride, index] = blocks
    grid = grid.unflatten(3, (repeat_out, -1)).unflatten(2, (repeat_in, -1))
    weight = grid.permute(4, 0, 5, 2, 1, 3).reshape(layer.out_features, layer.in_features)
    return weight if layer.low_rank_in is None else weight + layer.low_rank_out @ layer.low_rank_in


def kept_bytes(run):
    """Size of all storages that autograd keeps for backward."""
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = run()
    return sum(storages.values()), out


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)])
def test_it_is_the_linear_layer_of_its_dense_weight(sizes, lead):
    layer = layer_of(sizes, dtype=torch.float64)
    x = torch.randn(*lead, sizes["in_features"], dtype=torch.float64, requires_grad=True)
    wanted = [x, *layer.parameters()]
    fast, slow = layer(x), linear(x, dense_weight(layer), layer.bias)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-13)
    grad = torch.randn_like(fast)
    for ours, theirs in zip(
        torch.autograd.grad(fast, wanted, grad), torch.autograd.grad(slow, wanted, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("sizes", SHAPES)
def test_gradients_are_the_derivatives(sizes):
    layer = layer_of(sizes, dtype=torch.float64)
    names, weights = zip(*layer.named_parameters(), strict=True)
    x = torch.randn(3, sizes["in_features"], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, *weights: functional_call(layer, dict(zip(names, weights, strict=True)), (x,)), (x, *weights)
    )


@pytest.mark.parametrize("sizes", SHAPES)
def test_a_block_sees_itself_and_the_blocks_whose_number_differs_in_one_of_the_lowest_bits(sizes):
    layer = layer_of({**sizes, "rank": 0})
    n = min(layer.in_features, layer.out_features) // 2
    bits = layer.butterfly_size.bit_length() - 1
    for i, rows in enumerate(dense_weight(layer).split(2, dim=0)):
        for j, block in enumerate(rows.split(2, dim=1)):
            sees = (i - j) % n == 0 or any((i % n) ^ (j % n) == 2**bit for bit in range(bits))
            assert (block != 0).all() if sees else (block == 0).all()


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_number_of_parameters_is_known_beforehand(sizes, bias, rank):
    sizes = {**sizes, "block_size": 2, "rank": rank, "bias": bias}
    assert pixelfly_parameters(**sizes) == sum(p.numel() for p in PixelFly(**sizes).parameters())


def test_the_papers_feed_forward_shrinks_fourfold():
    dense = sum(p.numel() for p in nn.Linear(1024, 8192, device="meta").parameters())
    ours = pixelfly_parameters(1024, 8192, block_size=32, butterfly_size=32, rank=64, bias=True)
    assert ours == 6 * 32 * 8192 + 64 * (1024 + 8192) + 8192
    assert dense / ours > 3.8


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize(("in_features", "out_features"), [(256, 256), (128, 1024), (1024, 128)])
def test_outputs_start_with_the_variance_of_a_linear_layer(in_features, out_features, rank):
    torch.manual_seed(0)
    x = torch.randn(2000, in_features)
    layers = [
        PixelFly(in_features, out_features, block_size=16, butterfly_size=8, rank=rank),
        nn.Linear(in_features, out_features),
    ]
    ours, theirs = (layer(x).var().item() for layer in layers)
    assert ours == pytest.approx(theirs, rel=0.1)


def test_backward_keeps_the_input_once_however_many_blocks_it_meets():
    layer = layer_of({"in_features": 64, "out_features": 128, "butterfly_size": 32, "rank": 0})
    x = torch.randn(1000, 64, requires_grad=True)
    kept, _ = kept_bytes(lambda: layer(x))
    assert kept <= 4 * (x.numel() + layer.blocks.numel())


def test_under_autocast_it_computes_in_bfloat16_and_keeps_the_input_once_in_bfloat16():
    layer = layer_of({"in_features": 64, "out_features": 128, "butterfly_size": 32, "rank": 8})
    x = torch.randn(1000, 64, requires_grad=True)
    exact = linear(x, dense_weight(layer), layer.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept, out = kept_bytes(lambda: layer(x))
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() / exact.norm() < 0.01
    weights = layer.blocks.numel() + layer.low_rank_in.numel() + layer.low_rank_out.numel()
    hidden = 1000 * 8
    assert kept <= 2 * (x.numel() + weights + hidden)
    wanted = [x, *layer.parameters()]
    grads = torch.autograd.grad(out.float().square().sum(), wanted)
    for ours, theirs in zip(grads, torch.autograd.grad(exact.square().sum(), wanted), strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() / theirs.norm() < 0.02


def test_weights_and_nothing_else_make_the_round_trip(tmp_path):
    sizes = {"in_features": 8, "out_features": 24, "butterfly_size": 4, "rank": 2}
    layer, other = layer_of(sizes), PixelFly(**sizes, block_size=2)
    assert set(layer.state_dict()) == {"blocks", "low_rank_in", "low_rank_out", "bias"}
    other.load_state_dict(layer.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(layer(x), other(x))


def test_type_and_device_are_those_asked_for():
    layer = layer_of({"in_features": 8, "out_features": 8, "butterfly_size": 4, "rank": 2}, dtype=torch.bfloat16)
    assert layer(torch.randn(3, 8).bfloat16()).dtype == torch.bfloat16
    meta = layer_of({"in_features": 8, "out_features": 8, "butterfly_size": 4, "rank": 2}, device="meta")
    assert {p.device.type for p in meta.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 0}, "in_features=0"),
        ({"out_features": 96}, "out_features=96: one must be a multiple of the other"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 24}, "block_size=24: must divide"),
        ({"butterfly_size": 0}, "butterfly_size=0"),
        ({"butterfly_size": 3}, "butterfly_size=3: must be a power of two"),
        ({"butterfly_size": 16}, "butterfly_size=16: must divide the 8 blocks"),
        ({"rank": -1}, "rank=-1"),
        ({"rank": 65}, "rank=65"),
        ({"rank": 0.5}, "rank=0.5"),
    ],
)
def test_impossible_sizes_are_named(change, message):
    sizes = {"in_features": 64, "out_features": 64, "block_size": 8, "butterfly_size": 4, "rank": 2, "bias": True}
    for make in (PixelFly, pixelfly_parameters):
        with pytest.raises(ValueError, match=message):
            make(**{**sizes, **change})


def test_an_input_of_another_width_is_refused():
    layer = layer_of({"in_features": 8, "out_features": 8, "butterfly_size": 4, "rank": 0})
    with pytest.raises(ValueError, match="16 channels"):
        layer(torch.randn(3, 16))
