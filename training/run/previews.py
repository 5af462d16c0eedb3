"""Pictures drawn while the model trains, to look at. `inference` draws better and faster ones."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from dalle_lean import Dalle
from dalle_lean.io.files import atomic_write

TOP_K = 64
LENGTHS = 4
"""Into how many lengths the sequences of a drawing are rounded up: a CPU's kernels stay in memory for each length."""


@torch.no_grad()
def draw_codes(model: Dalle, text_ids: Tensor, generator: torch.Generator, top_k: int = TOP_K) -> Tensor:
    """Sample pictures for captions [B, T] -> codes [B, I], the plain way: the whole sequence again for each code.

    Each code is drawn at temperature 1 among the `top_k` likeliest, with `generator` (of the CPU).
    """
    config = model.config
    codes = text_ids.new_zeros(len(text_ids), config.image_len)
    step = -(-config.image_len // LENGTHS)
    for position in range(config.image_len):
        known = codes[:, : (position // step + 1) * step]  # no position sees the codes behind it
        logits = model(text_ids, known)[:, config.text_len + position, config.num_text_tokens :].float().cpu()
        likeliest, ids = logits.topk(min(top_k, logits.shape[1]))
        choice = torch.multinomial(likeliest.softmax(dim=1), 1, generator=generator)
        codes[:, position] = ids.gather(1, choice)[:, 0].to(codes.device)
    return codes


def save_sheet(path: Path, rows: Sequence[Tensor]) -> None:
    """Write rows of pictures [N, 3, H, W] in 0..1 as one PNG, the first row on top."""
    sheet = torch.cat([torch.cat(list(row), dim=2) for row in rows], dim=1)
    pixels = (sheet.float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    with atomic_write(path) as temporary:
        Image.fromarray(pixels).save(temporary, format="PNG")
