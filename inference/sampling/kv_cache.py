"""Decodes many pictures code by code, with a KV cache that holds only the keys each kind of attention needs.

R pictures (rows), N prompts with R / N pictures each, in the prompts' order (guidance counts each picture and prompt
twice: also with an empty caption); C codebook.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from inference.sampling.compiled_step import CompiledStep, kernels_for
from inference.sampling.cuda_graphs import StepGraphs
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.plain_step import PlainStep
from inference.sampling.prefill import Prompts

# A single row uses other kernels (matrix times vector), which round differently.
MIN_ROWS = 2


class KVCache:
    """The state of decoding, in the buffers of one way to take a step."""

    def __init__(self, decoder: PackedDecoder, prompts: Prompts, batch: int):
        """`batch` pictures, an equal number for each prompt."""
        assert batch % prompts.count == 0, "every prompt has as many pictures"
        self.decoder, self.prompts, self.config = decoder, prompts, decoder.config
        self.pictures, self.batch = batch, max(batch, MIN_ROWS)
        self.codes_read = prompts.num_codes
        kernels = kernels_for(decoder)
        self.step: PlainStep | CompiledStep
        if kernels is None:
            self.step = PlainStep(decoder, prompts, self.batch)
        else:
            self.step = CompiledStep(kernels, decoder, prompts, self.batch)
        self.graphs = StepGraphs(self.batch, decoder.device) if decoder.device.type == "cuda" else None

    def restart(self, prompts: Prompts) -> None:
        """Start again from other prompts, as many as before, in the same buffers; only plain steps can."""
        assert isinstance(self.step, PlainStep)
        self.step.restart(prompts)
        self.codes_read = prompts.num_codes

    @property
    def num_bytes(self) -> int:
        """Bytes held for the codes read and for the prompts."""
        held = [*self.step.buffers, *self.prompts.text_kv]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @torch.inference_mode()
    def decode_step(self, codes: Tensor) -> Tensor:
        """Read the next code [R] of each picture -> float32 logits [R, C] of the code after it."""
        assert self.codes_read < self.config.image_len - 1, "nothing follows the last code"
        row, column = divmod(self.codes_read, self.config.image_side)
        place = torch.full((1,), self.codes_read, device=self.decoder.device)  # without waiting for the device
        arguments = codes.expand(self.batch), column, row, place
        run = partial(self.graphs.run, self.step) if self.graphs else self.step  # type: ignore[arg-type]
        logits = run(*arguments)
        self.codes_read += 1
        return logits[: self.pictures]


@contextmanager
def kv_cache(decoder: PackedDecoder, prompts: Prompts, batch: int) -> Iterator[KVCache]:
    """A cache for `batch` pictures, an equal number for each prompt. On CUDA it is the last batch's if that had the
    same size, so that its graphs need not be recorded again. It is freed if drawing is cancelled or fails."""
    cache, decoder.idle_cache = decoder.idle_cache, None
    if cache is not None and (cache.pictures, cache.prompts.count) == (batch, prompts.count):
        cache.restart(prompts)
    else:
        cache = None  # frees memory that may be needed
        cache = KVCache(decoder, prompts, batch)
    yield cache
    if cache.graphs is not None:
        decoder.idle_cache = cache
