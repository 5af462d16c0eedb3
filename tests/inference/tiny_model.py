"""A whole model folder of a few thousand random weights: transformer, tokenizer, VQGAN and CLIP."""

from pathlib import Path

import torch
from torch import nn

from dalle_lean import Dalle, DalleConfig, save_model
from dalle_lean.clip.architecture import build_clip, model_config
from dalle_lean.clip.scorer import ClipScorer
from dalle_lean.tokenizer import Tokenizer
from tests.tiny import DALLE_FIELDS, tiny_vqgan

CAPTIONS = ["a red heart", "a green book", "a blue circle on a white ground", "two black cats", "a house", "a red car"]
TEXT_LEN = 16
CODEBOOK_SIZE = 64


def lively(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every weight moved away from its initial value, so that each of them matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.eval()


def tiny_dalle(text_vocab_size: int = 300) -> Dalle:
    torch.manual_seed(0)
    vocabularies = {"text_vocab_size": text_vocab_size, "text_len": TEXT_LEN, "image_vocab_size": CODEBOOK_SIZE}
    return lively(Dalle(DalleConfig(**DALLE_FIELDS | vocabularies | {"num_heads": 2, "head_size": 12})))


def tiny_clip(tokenizer: Tokenizer) -> ClipScorer:
    architecture = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {
            "context_length": TEXT_LEN,
            "vocab_size": tokenizer.vocab_size,
            "width": 32,
            "heads": 2,
            "layers": 1,
            "pool_type": "eos",
            "eos_id": tokenizer.padding_id,
        },
    }
    torch.manual_seed(0)
    return ClipScorer(architecture, build_clip(model_config(architecture)).state_dict(), tokenizer=tokenizer)


def save_tiny_model(folder: Path, *, with_clip: bool = True) -> Path:
    """Write the model to `folder`/model and return that."""
    tokenizer = Tokenizer.train(CAPTIONS, vocab_size=300)
    tokenizer.save(folder / "tokenizer.json")
    vqgan = tiny_vqgan(codebook_size=CODEBOOK_SIZE)
    vqgan.save(folder / "vqgan")
    if with_clip:
        tiny_clip(tokenizer).save(folder / "clip")
    save_model(
        tiny_dalle(),
        folder / "model",
        tokenizer=folder / "tokenizer.json",
        vqgan=folder / "vqgan",
        clip=folder / "clip" if with_clip else None,
        card="A tiny model with random weights.",
        vqgan_fingerprint=vqgan.fingerprint(),
    )
    return folder / "model"
