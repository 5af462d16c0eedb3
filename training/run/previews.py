"""Pictures to look at, drawn during training."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from dalle_lean import Dalle
from dalle_lean.images.files import to_uint8
from dalle_lean.io.files import atomic_write
from inference.gallery import tile_sheet
from inference.request import Settings
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import read_prompts
from inference.sampling.sampler import Row, sample_codes


def draw_codes(model: Dalle, text_ids: Tensor, *, seed: int, top_k: int = 64) -> Tensor:
    """Sample a picture for each caption [B, T] at temperature 1 from the `top_k` likeliest codes -> codes [B, I]."""
    decoder = PackedDecoder(model)
    settings = Settings(top_k=top_k, top_p=1, seed=seed)
    rows = [Row(picture, settings) for picture in range(len(text_ids))]
    *_, codes = sample_codes(decoder, read_prompts(decoder, text_ids), rows)
    return codes


def save_sheet(path: Path, rows: Sequence[Tensor]) -> None:
    """Write rows of pictures [N, 3, H, W] in 0..1 as one PNG, first row on top."""
    sheet = torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1)
    pixels = to_uint8(sheet.float().clamp(0, 1)).permute(1, 2, 0).cpu().numpy()
    with atomic_write(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG")


def save_samples(path: Path, heldout: Tensor, drawn: Tensor, captions: Sequence[str]) -> None:
    """Write held-out pictures [N, 3, H, W] in 0..1 as one PNG, beside each the one drawn for its caption."""
    tiles, texts = [], []
    for *pair, caption in zip(heldout, drawn, captions, strict=True):
        tiles += [Image.fromarray(to_uint8(one.float().clamp(0, 1)).permute(1, 2, 0).cpu().numpy()) for one in pair]
        texts += [f"held-out: {caption}", f"drawn: {caption}"]
    with atomic_write(path) as temporary:
        tile_sheet(tiles, texts, caption_lines=2).save(temporary, format="PNG")
