import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.allocations import allocated, hooked_bytes, step_bytes

KIB = 1024


def tensor(kib):
    return torch.ones(kib * KIB // 4)


def test_every_byte_is_counted_and_the_peak_is_the_most_at_once():
    def run():
        first, second = tensor(8), tensor(16)
        del first
        third = tensor(4)
        del second
        return third

    peak, live, result = allocated(run)
    assert (peak, live) == (24 * KIB, 4 * KIB)
    assert result.numel() == KIB


def test_memory_inside_of_a_kernel_is_counted():
    x = torch.randn(64, 64)
    peak, live, _ = allocated(lambda: x.sort(dim=0).values)
    assert live == 64 * 64 * 4
    assert peak >= live + 64 * 64 * 8, "the places, which the result does not hold"


def test_a_linear_layer_keeps_its_input_and_makes_two_gradients():
    layer = nn.Linear(32, 32, bias=False)
    x = torch.randn(128, 32)
    assert hooked_bytes(lambda: layer(x * 1), layer.parameters()) == 128 * 32 * 4
    step = step_bytes(lambda: layer(x * 1).sum(), layer.parameters())
    assert step.kept_bytes == 128 * 32 * 4 + 4, "the input and the loss"
    assert step.peak_bytes >= step.kept_bytes + 32 * 32 * 4, "and the weight's gradient until it is added"


def test_checkpoints_keep_their_input_alone():
    layer = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    x = torch.randn(128, 32, requires_grad=True)
    plain = hooked_bytes(lambda: layer(x).sum(), layer.parameters())
    lean = hooked_bytes(lambda: checkpoint(layer, x, use_reentrant=False).sum(), layer.parameters())
    assert plain == 128 * 4 * (32 + 64 + 64)
    assert lean == pytest.approx(128 * 4 * 32, abs=64)


def test_what_is_said_on_standard_error_afterwards_is_heard(capfd):
    allocated(lambda: tensor(1))
    print("heard", file=sys.stderr)
    assert capfd.readouterr().err.strip() == "heard"
