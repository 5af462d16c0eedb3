"""Decodes many pictures code by code, with a KV cache that holds only the keys each kind of attention needs.

R pictures (rows), N prompts with R / N pictures each, in the prompts' order (guidance counts each picture and prompt
twice: also with an empty caption); C codebook.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from inference.sampling.compiled_step import CompiledStep, kernels_for
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
        self.graphs: StepGraphs | None = None
        if kernels is not None:
            self.step = CompiledStep(kernels, decoder, prompts, self.batch)
        else:
            self.step = PlainStep(decoder, prompts, self.batch)
            if decoder.device.type == "cuda":
                self.graphs = StepGraphs(self.step, self.batch, decoder.device)

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
        logits = (self.graphs or self.step)(codes.expand(self.batch), column, row, place)
        self.codes_read += 1
        return logits[: self.pictures]


class StepGraphs:
    """The graphs of one cache's step on a CUDA device: each call launches hundreds of small kernels at once.

    The operations of a step depend on the column of the code that it reads, and on the row only through tensors. So
    there is one graph per column, recorded the second time that this column is read.
    """

    def __init__(self, step: PlainStep, batch: int, device: torch.device):
        self.step, self.device = step, device
        self.codes = torch.zeros(batch, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.row = torch.zeros(1, dtype=torch.long, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # Graphs of one cache never run at the same time, so they share their memory.
        self.pool = torch.cuda.graph_pool_handle()
        self.warmed_up: set[int] = set()

    def __call__(self, codes: Tensor, column: int, row: int, place: Tensor) -> Tensor:
        """The step's logits, which the next call overwrites."""
        self.codes.copy_(codes)
        self.place.copy_(place)
        self.row.fill_(row)
        if column not in self.warmed_up:
            # In their first run libraries initialise themselves, which cannot be recorded.
            self.warmed_up.add(column)
            return self.step(self.codes, column, self.row, self.place)
        if column not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            # On this device, which need not be the current one; other threads may use CUDA meanwhile.
            with (
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                logits = self.step(self.codes, column, self.row, self.place)
            self.graphs[column] = graph, logits
        graph, logits = self.graphs[column]
        graph.replay()
        return logits


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
