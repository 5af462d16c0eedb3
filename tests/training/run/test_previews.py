"""Pictures drawn while the model trains."""

import torch

from dalle_lean import Dalle, DalleConfig
from inference.sampling.noise import GumbelNoise
from training.run.previews import draw_codes


def test_codes_are_those_of_a_sequence_that_grows_code_by_code():
    torch.manual_seed(0)
    config = DalleConfig(
        text_len=3, text_vocab_size=20, image_side=5, image_vocab_size=40, hidden_size=32, num_layers=4, num_heads=2,
        head_size=16, shared_blocks=None,
    )  # fmt: skip
    model = Dalle(config)
    text_ids = torch.randint(1, 20, (2, 3), generator=torch.Generator().manual_seed(1))
    noise = GumbelNoise([7, 7], [0, 1], 40, 25, torch.device("cpu"))
    codes = text_ids.new_zeros(2, 0)
    with torch.no_grad():
        for step in range(25):
            likeliest, ids = model(text_ids, codes)[:, -1, config.num_text_tokens :].topk(8)
            choice = (likeliest + noise.at(step).gather(1, ids)).argmax(dim=1, keepdim=True)
            codes = torch.cat([codes, ids.gather(1, choice)], dim=1)
    assert torch.equal(draw_codes(model, text_ids, seed=7, top_k=8), codes)
