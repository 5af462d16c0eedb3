"""The kernel that draws against torch's guidance, filter, noise and sampling, one after another."""

from dataclasses import replace

import pytest
import torch

from dalle_lean import Dalle, DalleConfig
from inference.request import Settings
from inference.sampling.load_kernels import kernels
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.sampler import Draw, Row
from tests.tiny import DALLE_FIELDS

pytestmark = pytest.mark.skipif(kernels() is None, reason="numba cannot be used here")
SETTINGS = [
    Settings(),
    Settings(top_k=0, top_p=1.0),
    Settings(top_k=0, top_p=0.3, seed=2**64 - 1),
    Settings(top_k=3, top_p=1.0, temperature=0.4),
    Settings(top_k=5000, top_p=0.9, temperature=2.5, seed=2**40),
    Settings(top_k=40, top_p=0.0),
    Settings(temperature=0.0),
]


def draws(rows, codes):
    """The compiled and the plain way to draw."""
    model = Dalle(DalleConfig(**{**DALLE_FIELDS, "image_vocab_size": codes}))
    compiled, plain = (Draw(PackedDecoder(model, compiled=compiled), rows) for compiled in (True, False))
    assert compiled.kernels is not None
    assert plain.kernels is None
    return compiled, plain


@pytest.mark.parametrize("codes", [10, 1021, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16 makes ties
@pytest.mark.parametrize("guidance", [None, 1.0, 2.5])
def test_the_kernel_draws_what_torch_draws(codes, dtype, guidance):
    torch.manual_seed(0)
    settings = [replace(choice, guidance=guidance or 1.0) for choice in SETTINGS]
    rows = [Row(picture + 2**40, settings[picture % len(settings)]) for picture in range(60)]
    compiled, plain = draws(rows, codes)
    for step in range(DalleConfig(**DALLE_FIELDS).image_len):
        logits = (torch.randn(60 if guidance is None else 120, codes) * 3).to(dtype).float()
        assert torch.equal(compiled(step, logits), plain(step, logits))


def test_a_code_that_is_never_likely_is_never_drawn():
    compiled, plain = draws([Row(picture, Settings(top_p=1.0)) for picture in range(500)], 10)
    logits = torch.full((500, 10), -torch.inf)
    logits[:, 3], logits[:, 7] = 0.0, 1.0
    drawn = compiled(0, logits)
    assert set(drawn.tolist()) == {3, 7}
    assert torch.equal(drawn, plain(0, logits))
