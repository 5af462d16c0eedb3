"""The VQGAN that tests share: all there is of a real one, of a few thousand weights."""

import dataclasses

import torch

from dalle_lean.vqgan import VQGAN, VQGANConfig

VQGAN_CONFIG = VQGANConfig(
    quantizer="vq",
    codebook_size=32,
    code_width=8,
    z_channels=8,
    channels=32,
    channel_multipliers=(1, 1, 1, 1),
    num_res_blocks=1,
    attention_resolutions=(),
    picture_side=32,
    norm_groups=8,
)


def tiny_vqgan(*, seed: int = 0, **changes) -> VQGAN:
    """VQGAN_CONFIG with `changes`, and random weights."""
    torch.manual_seed(seed)
    return VQGAN(dataclasses.replace(VQGAN_CONFIG, **changes)).eval()
