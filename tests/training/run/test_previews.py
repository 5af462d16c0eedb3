"""Pictures drawn while the model trains."""

import pytest
import torch

from dalle_lean import Dalle, DalleConfig
from training.run import previews
from training.run.previews import draw_codes

TOP_K = 8


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = DalleConfig(
        text_len=3, text_vocab_size=20, image_side=5, image_vocab_size=40, hidden_size=32, num_layers=4, num_heads=2,
        head_size=16, shared_blocks=None,
    )  # fmt: skip
    return Dalle(config).eval()


def test_codes_are_those_of_a_sequence_that_grows_code_by_code(model):
    text_ids = torch.randint(1, 20, (2, 3), generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    codes = text_ids.new_zeros(2, 0)
    with torch.no_grad():
        for _ in range(25):
            likeliest, ids = model(text_ids, codes)[:, -1, model.config.num_text_tokens :].topk(TOP_K)
            choice = torch.multinomial(likeliest.softmax(dim=1), 1, generator=generator)
            codes = torch.cat([codes, ids.gather(1, choice)], dim=1)
    assert torch.equal(draw_codes(model, text_ids, torch.Generator().manual_seed(2), TOP_K), codes)


def test_a_drawing_has_few_lengths_so_that_few_kernels_stay_in_memory(model, monkeypatch):
    lengths = set()
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda text, codes: (lengths.add(codes.shape[1]), forward(text, codes))[1])
    draw_codes(model, torch.ones(1, 3, dtype=torch.long), torch.Generator().manual_seed(0))
    assert len(lengths) <= previews.LENGTHS
