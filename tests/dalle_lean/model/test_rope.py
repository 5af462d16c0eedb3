import math

import pytest
import torch

from dalle_lean.model.rope import rotary_angles, rotary_table, rotate
from tests import golden_data as golden


@pytest.mark.parametrize("name", golden.DALLE_FIXTURES)
def test_angles_are_the_published_buffer(name):
    config = golden.config(name)
    angles = rotary_angles(config.num_text_positions, config.image_side, config.head_size)
    published = golden.tensors(name)["state.transformer.pos_emb"]
    assert torch.equal(angles.repeat_interleave(2, dim=-1)[None], published)


def test_rotation_turns_each_pair_by_its_angle_and_leaves_the_rest():
    angles = rotary_angles(3, 2, 14)
    x = torch.randn(2, 7, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, rotary_table(angles, x.dtype))
    for position in range(7):
        for pair in range(angles.shape[1]):
            angle = float(angles[position, pair])
            z = torch.complex(x[:, position, 2 * pair], x[:, position, 2 * pair + 1])
            z = z * complex(math.cos(angle), math.sin(angle))
            torch.testing.assert_close(turned[:, position, 2 * pair : 2 * pair + 2], torch.view_as_real(z))
    assert torch.equal(turned[..., 2 * angles.shape[1] :], x[..., 2 * angles.shape[1] :])


def test_bfloat16_activations_are_turned_by_exact_angles():
    angles = rotary_angles(300, 4, 64)
    x = torch.randn(1, 316, 64, generator=torch.Generator().manual_seed(0))
    exact = rotate(x.bfloat16().double(), rotary_table(angles, torch.float64))
    half = rotate(x.bfloat16(), rotary_table(angles, torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert (half.double() - exact).abs().max() < 2**-6


def test_the_gradient_is_turned_back():
    table = rotary_table(rotary_angles(3, 2, 14), torch.float64)
    x = torch.randn(2, 7, 14, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), x)
