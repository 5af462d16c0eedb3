"""What the lean stack owes to any branch: the same random numbers twice, and none taken from the caller."""

import pytest
import torch
from torch import nn

from dalle_lean import MemoryPlan
from dalle_lean.lean import Piece
from dalle_lean.stack import run_lean, run_reversible_keeping, run_sequential


class Dropout:
    """A branch that draws random numbers in every piece."""

    def __init__(self):
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.entry, self.exit, self.parameters = [], [self.weight], [self.weight]

    def enter(self, x, weights):
        return x * 1.5

    def pieces(self, shape, plan):
        yield Piece(lambda x: x, self.drop)
        yield Piece(lambda x: x, self.drop)

    def drop(self, h, weights):
        return nn.functional.dropout(h, 0.5) * self.weight

    def run(self, x, weights=None):
        h = self.enter(x, weights)
        return self.drop(h, weights) + self.drop(h, weights)


@pytest.mark.parametrize("reversible", [True, False])
def test_backward_draws_the_random_numbers_of_forward(reversible):
    torch.manual_seed(0)
    stack = [(Dropout(), Dropout()) for _ in range(3)]
    weights = [branch.weight for layer in stack for branch in layer]
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    results = []
    for lean in (True, False):
        torch.manual_seed(1)
        if lean:
            out = run_lean(x, stack, MemoryPlan(), torch.float64, reversible)
        else:
            keep = run_reversible_keeping if reversible else run_sequential
            out = keep(x, [(attend.run, feed.run) for attend, feed in stack])
        results.append((out, torch.autograd.grad(out.square().sum(), [x, *weights])))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("reversible", [True, False])
def test_backward_leaves_the_random_numbers_that_follow_alone(reversible):
    """Else every step would draw the masks of the step before it again."""
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    out = run_lean(x, [(Dropout(), Dropout())], MemoryPlan(), torch.float64, reversible)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
