"""A prompt's codes, drawn one after another for a batch of pictures."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dalle_lean.model import Dalle
from inference.cache import PictureCache, Prompt
from inference.filtering import check_sampling, choose, filter_logits
from inference.noise import check_seed, gumbel_noise

# Matrix products of fewer rows take other kernels, which round differently; whole groups of rows round alike, so that
# picture i is the same in every batch.
ROW_GROUP = 8


@torch.inference_mode()
def sample_codes(
    model: Dalle,
    prompt: Prompt,
    pictures: Sequence[int],
    *,
    top_k: int = 256,
    top_p: float = 0.75,
    temperature: float = 1.0,
    seed: int = 0,
    guidance: float = 1.0,
    null: Prompt | None = None,
    start: Tensor | None = None,
) -> Iterator[Tensor]:
    """Draw the pictures with these indices; yields their codes so far, [B, n] for n = 1..I.

    Code n of picture i depends on the prompt, the settings, the seed and i, not on the other pictures.
    Stop iterating, or close the iterator, to cancel: nothing is kept.
    """
    check_sampling(top_k, top_p, temperature)
    check_seed(seed)
    config, device = model.config, prompt.logits.device
    rows = -(-len(pictures) // ROW_GROUP) * ROW_GROUP
    index_B = torch.tensor([*pictures, *[0] * (rows - len(pictures))], device=device)
    prompts = [prompt] if null is None else [prompt, null]
    caches = [PictureCache(model, prompt, rows) for prompt in prompts]
    codes = torch.empty(rows, config.image_len, dtype=torch.long, device=device)
    logits = [prompt.logits.expand(rows, -1) for prompt in prompts]
    given = 0 if start is None else len(start)
    for step in range(config.image_len):
        if step < given:
            assert start is not None
            codes[:, step] = start[step]
        else:
            guided = logits[-1] + (logits[0] - logits[-1]) * guidance
            noise = gumbel_noise(seed, index_B, step, config.image_vocab_size)
            codes[:, step] = choose(filter_logits(guided, top_k, top_p), noise, temperature)
        yield codes[: len(pictures), : step + 1]
        if step + 1 < config.image_len:
            logits = [cache.read(codes[:, step]) for cache in caches]
