"""The models that tests share: all there is of real ones, of a few thousand weights."""

import dataclasses

import torch

from dalle_lean import Dalle, DalleConfig
from dalle_lean.images.vqgan import VQGAN, VQGANConfig

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


DALLE_FIELDS = {
    "text_vocab_size": 50,
    "text_len": 6,
    "image_vocab_size": 40,
    "image_side": 4,
    "hidden_size": 32,
    "num_layers": 5,
    "num_heads": 3,
    "head_size": 8,
}


def tiny_dalle(*, dtype=torch.float32, **changes) -> Dalle:
    """DALLE_FIELDS with `changes`, random weights, and branches that all count."""
    torch.manual_seed(0)
    model = Dalle(DalleConfig(**{**DALLE_FIELDS, **changes}), dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("scale"):
            parameter.data.uniform_(0.5, 1.5)
    return model


def tiny_batch(size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Caption ids and image codes for `tiny_dalle`."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 50, (size, 6), generator=generator)
    return text, torch.randint(0, 40, (size, 16), generator=generator)
