import pytest
import torch

from dalle_lean.optim.quantize8 import SMALLEST_SCALE, dequantize, dynamic_map, quantize, zero_code


def round_trip(x, *, signed, block_size):
    codes, scales = quantize(x, signed=signed, block_size=block_size)
    return dequantize(codes, scales, signed=signed, block_size=block_size)


def nearest_value(x, *, signed, block_size):
    """The slow, obvious twin: each element against all 256 values."""
    parts = []
    for block in x.reshape(-1).split(block_size):
        values = dynamic_map(signed) * block.abs().max()
        parts.append(values[(block[:, None] - values).abs().argmin(dim=1)])
    return torch.cat(parts).view(x.shape)


@pytest.fixture
def numbers():
    """2500 numbers of very different size, as moving averages have."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(50, 50, generator=generator) * 10 ** (-4 * torch.rand(50, 50, generator=generator))


def test_a_map_has_256_ascending_values_that_reach_one_and_hold_zero():
    for signed in (True, False):
        values = dynamic_map(signed)
        assert len(values) == 256
        assert (values.diff() > 0).all()
        assert values[-1] == 1
        assert 0 in values
        assert values[0] == (values[0] if signed else 0)


@pytest.mark.parametrize("block_size", [64, 100, 4096])
@pytest.mark.parametrize("signed", [True, False])
def test_every_number_gets_the_nearest_value_or_one_as_near(numbers, signed, block_size):
    x = numbers if signed else numbers.abs()
    ours = (round_trip(x, signed=signed, block_size=block_size) - x).abs()
    best = (nearest_value(x, signed=signed, block_size=block_size) - x).abs()
    # Rounding to bfloat16 moves a number by 2^-8 of itself at most; next to a midpoint that counts twice.
    assert (ours <= best + x.abs() * 2**-7).all()
    assert ours.mean() < 1.05 * best.mean()


@pytest.mark.parametrize("signed", [True, False])
def test_exact_zeros_stay_zero_beside_large_numbers(signed):
    x = torch.zeros(10_000)
    x[::3] = torch.rand(3334)
    assert (round_trip(x, signed=signed, block_size=4096)[x == 0] == 0).all()


def test_a_second_moment_never_vanishes():
    x = torch.tensor([1.0, 1e-9, 1e-20, 0.0])
    assert (round_trip(x, signed=False, block_size=4) > 0).tolist() == [True, True, True, False]


def test_a_block_of_subnormal_numbers_keeps_zeros():
    x = torch.tensor([SMALLEST_SCALE / 4, -SMALLEST_SCALE / 8, 1.0, 0.5])
    codes, scales = quantize(x, signed=True, block_size=2)
    assert codes[:2].tolist() == [zero_code(True)] * 2
    assert scales.tolist() == [0, 1]


def test_blocks_do_not_disturb_each_other():
    x = torch.cat([torch.full((7,), 1e-6), torch.full((7,), 1e6)])
    torch.testing.assert_close(round_trip(x, signed=True, block_size=7), x)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (4095,), (4097,), (3, 5, 7)])
def test_any_shape_comes_back(shape):
    codes, scales = quantize(torch.ones(shape), signed=True, block_size=4096)
    assert codes.shape == shape
    assert codes.dtype == torch.uint8
    assert len(scales) == -(-codes.numel() // 4096)
    assert torch.equal(dequantize(codes, scales, signed=True, block_size=4096), torch.ones(shape))


def test_a_transposed_tensor_is_read_in_its_own_order(numbers):
    straight = round_trip(numbers.t().contiguous(), signed=True, block_size=64)
    assert torch.equal(round_trip(numbers.t(), signed=True, block_size=64), straight)


def test_the_map_is_the_one_bitsandbytes_has_on_a_gpu():
    functional = pytest.importorskip("bitsandbytes.functional")
    for signed in (True, False):
        torch.testing.assert_close(dynamic_map(signed), functional.create_dynamic_map(signed), rtol=0, atol=1e-7)
