import gc
import sys

import torch
from torch import nn

from benchmarks.allocations import allocated, step_bytes

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


def test_garbage_of_an_earlier_function_is_not_counted():
    def leave_a_cycle():
        cycle = [tensor(8)]
        cycle.append(cycle)

    allocated(leave_a_cycle)
    _, live, _ = allocated(lambda: [[] for _ in range(100_000)])  # so many that Python would collect
    assert live == 0
    assert gc.isenabled()


def test_memory_inside_of_a_kernel_is_counted():
    x = torch.randn(64, 64)
    peak, live, _ = allocated(lambda: x.sort(dim=0).values)
    assert live == 64 * 64 * 4
    assert peak >= live + 64 * 64 * 8, "the places, which the result does not hold"


def test_a_linear_layer_keeps_its_input_and_makes_two_gradients():
    layer = nn.Linear(32, 32, bias=False)
    x = torch.randn(128, 32)
    step = step_bytes(lambda: layer(x * 1).sum(), layer.parameters())
    assert step.kept_bytes == 128 * 32 * 4 + 4, "the input and the loss"
    assert step.peak_bytes >= step.kept_bytes + 32 * 32 * 4, "and the weight's gradient until it is added"


def test_what_is_said_on_standard_error_afterwards_is_heard(capfd):
    allocated(lambda: tensor(1))
    print("heard", file=sys.stderr)
    assert capfd.readouterr().err.strip() == "heard"
