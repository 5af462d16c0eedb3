import pytest
import torch

from dalle_lean.model.token_shift import token_shift


@pytest.mark.parametrize("codes", [0, 1, 4, 7, 9])
def test_each_position_takes_its_neighbours_channels(codes):
    num_text, side, width = 5, 3, 8
    x = torch.randn(2, num_text + codes, width, generator=torch.Generator().manual_seed(0))
    slow = x.clone()
    for position in range(x.shape[1]):
        code = position - num_text
        if position < num_text:
            slow[:, position, : width // 2] = x[:, position - 1, : width // 2] if position else 0
        else:
            slow[:, position, : width // 4] = x[:, position - side, : width // 4] if code >= side else 0
            left = x[:, position - 1, width // 4 : width // 2] if code % side else 0
            slow[:, position, width // 4 : width // 2] = left
    assert torch.equal(token_shift(x, num_text, side), slow)


@pytest.mark.parametrize(("num_text", "side", "length"), [(5, 3, 14), (5, 3, 10), (1, 4, 8), (3, 2, 3), (2, 1, 3)])
def test_gradients_go_back_the_way_channels_came(num_text, side, length):
    x = torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: token_shift(x, num_text, side), x)
