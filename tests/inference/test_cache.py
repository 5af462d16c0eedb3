"""Each step of the cached decoder against the model run over everything so far."""

import pytest
import torch

from dalle_lean import Dalle, DalleConfig
from inference.cache import PictureCache, read_prompt

TINY = {
    "text_vocab_size": 50,
    "text_len": 6,
    "image_vocab_size": 32,
    "image_side": 5,
    "hidden_size": 32,
    "num_layers": 5,
    "num_heads": 2,
    "head_size": 12,
}
KINDS = {
    "row": {"attention_pattern": ("row",), "last_attention": None},
    "column": {"attention_pattern": ("column",), "last_attention": None},
    "conv centred": {"attention_pattern": ("conv",), "last_attention": None, "conv_kernel": 3},
    "conv corner": {"attention_pattern": ("conv",), "last_attention": None, "conv_kernel": 3, "conv_window": "corner"},
    "full": {"attention_pattern": ("full",), "last_attention": None},
    "the paper's": {},
}
VARIANTS = {
    "paper": {},
    "no shift": {"token_shift": False},
    "one stream": {"reversible": False},
    "learnt positions": {"rotary": False},
    "untied": {"tie_embeddings": False, "shared_blocks": None},
    "sandwich": {"sandwich_norm": True},
}


def lively(config: DalleConfig) -> Dalle:
    """A model in which every weight matters: nothing stands at its small initial value."""
    torch.manual_seed(0)
    model = Dalle(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_agrees_with_the_uncached_model(kind, variant):
    config = DalleConfig(**TINY | KINDS[kind] | VARIANTS[variant])
    model = lively(config)
    text = torch.randint(0, config.text_vocab_size, (1, config.text_len))
    codes = torch.randint(0, config.image_vocab_size, (3, config.image_len))
    with torch.no_grad():
        expected = model(text.expand(3, -1), codes)[:, config.text_len :, config.num_text_tokens :]

    prompt = read_prompt(model, text)
    cache = PictureCache(model, prompt, batch=3)
    steps = [prompt.logits.expand(3, -1), *(cache.read(codes[:, place]) for place in range(config.image_len - 1))]

    torch.testing.assert_close(torch.stack(steps, dim=1), expected, atol=1e-4, rtol=0)


def test_a_step_sees_nothing_of_what_comes_later():
    config = DalleConfig(**TINY)
    model = lively(config)
    text = torch.randint(0, config.text_vocab_size, (1, config.text_len))
    codes = torch.randint(0, config.image_vocab_size, (2, config.image_len))
    cache = PictureCache(model, read_prompt(model, text), batch=2)
    for place in range(12):
        logits = cache.read(codes[:, place])
        with torch.no_grad():
            uncached = model(text.expand(2, -1), codes[:, : place + 1])[:, -1, config.num_text_tokens :]
        torch.testing.assert_close(logits, uncached, atol=1e-4, rtol=0)
