import pytest
import torch
from torch.nn.functional import gelu

from dalle_lean.model.layers import geglu


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_torchs_gelu(dtype):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(5, 3, 8, generator=generator)).to(dtype).requires_grad_()
    upstream = torch.randn(5, 3, 4, generator=generator).to(dtype)
    value, gate = x.chunk(2, dim=-1)
    expected = value * gelu(gate)
    torch.testing.assert_close(geglu(x), expected)
    ours, theirs = (torch.autograd.grad(out, x, upstream)[0] for out in (geglu(x), expected))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound / 100)


def test_far_gates_give_finite_gradients():
    x = torch.tensor([[1.0, 1.0, 100.0, -100.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(geglu(x).sum(), x)
    torch.testing.assert_close(grad, torch.tensor([[100.0, 0.0, 1.0, 0.0]]))
