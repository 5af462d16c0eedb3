"""Draws codes one by one for a batch of pictures of one or several prompts.

N prompts, R rows: R / N pictures for each prompt, in the prompts' order; I codes in a picture.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inference.sampling.draw import Draw, Row
from inference.sampling.kv_cache import kv_cache
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.prefill import Prompts


@torch.inference_mode()
def sample_codes(decoder: PackedDecoder, prompts: Prompts, rows: Sequence[Row]) -> Iterator[Tensor]:
    """Draw pictures; yields their codes so far, [R, n] for n = m + 1..I, where m codes are given with the prompts.

    A picture depends on its prompt, sampling settings and index, not on the other rows. Close the iterator to cancel,
    which keeps nothing.
    """
    config, given = decoder.config, prompts.num_codes
    assert prompts.guided or all(row.settings.guidance == 1 for row in rows), "guidance needs the empty captions"
    copies = 2 if prompts.guided else 1
    per_prompt = copies * len(rows) // prompts.count
    draw = Draw(decoder, rows)
    codes = torch.empty(len(rows), config.image_len, dtype=torch.long, device=decoder.device)
    codes[:, :given] = prompts.codes[: prompts.count // copies].repeat_interleave(per_prompt, dim=0)
    logits = prompts.logits.repeat_interleave(per_prompt, dim=0)
    with kv_cache(decoder, prompts, copies * len(rows)) as cache:
        for step in range(given, config.image_len):
            codes[:, step] = draw(step, logits)
            yield codes[:, : step + 1]
            if step + 1 < config.image_len:
                logits = cache.decode_step(codes[:, step].repeat(copies))
