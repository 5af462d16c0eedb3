"""Configs of all sorts, small enough for tests."""

import dataclasses

import torch

from dalle_lean import DalleConfig

TINY = DalleConfig(
    text_vocab_size=50,
    text_len=12,
    image_vocab_size=40,
    image_side=6,
    hidden_size=32,
    num_layers=5,
    num_heads=4,
    head_size=8,
)


def changed(**fields):
    return dataclasses.replace(TINY, **fields)


VARIANTS = {
    "paper's kind": TINY,
    "one stream": changed(reversible=False),
    "sandwich, nothing tied": changed(sandwich_norm=True, shared_blocks=None),
    "full": changed(attention_pattern=("full", "row"), last_attention=None, shared_blocks=(0, 1, 0, 1, 0)),
    "corner": changed(attention_pattern=("conv",), last_attention=None, conv_window="corner", conv_kernel=3),
    "untied, learnt positions": changed(tie_embeddings=False, rotary=False, token_shift=False, reversible=False),
    "ungated": changed(ffn_gated=False, ffn_activation="relu_squared", ffn_multiplier=3, head_size=24),
    "sparse": changed(pixelfly_rank=4, pixelfly_block_size=8, pixelfly_butterfly_size=2),
    "sparse without low rank": changed(pixelfly_rank=0, pixelfly_block_size=8, pixelfly_butterfly_size=4),
}


def batch(config, size):
    """Random captions and codes."""
    generator = torch.Generator().manual_seed(0)
    text_ids = torch.randint(config.text_vocab_size, (size, config.text_len), generator=generator)
    codes = torch.randint(config.image_vocab_size, (size, config.image_len), generator=generator)
    return text_ids, codes
