"""A step of decoding as one CUDA graph: hundreds of small kernels started by one call.

What a step does depends on the column of the code it reads, and on the row only through tensors; so there is one graph
for each column of the picture, recorded the second time that column is read. R pictures.
"""

import torch
from torch import Tensor

from inference.sampling.decoder import Decoder
from inference.sampling.kv_cache import KVCache
from inference.sampling.prefill import Prompts


class GraphedCache(KVCache):
    """A KVCache on a CUDA device that replays its steps."""

    def __init__(self, decoder: Decoder, prompts: Prompts, batch: int):
        super().__init__(decoder, prompts, batch)
        device = decoder.device
        self.codes = torch.zeros(self.batch, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.row = torch.zeros(1, dtype=torch.long, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # Graphs of one cache never run at the same time, so they share their memory.
        self.pool = torch.cuda.graph_pool_handle()
        self.met: set[int] = set()

    def step(self, codes: Tensor, column: int, row: int | Tensor, place: Tensor) -> Tensor:
        """As in KVCache; the logits are overwritten by the next step."""
        self.codes.copy_(codes)
        self.place.copy_(place)
        self.row.fill_(row)
        if column not in self.met:
            # Libraries set themselves up in a first run, which cannot be recorded.
            self.met.add(column)
            return super().step(self.codes, column, self.row, self.place)
        if column not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            # On this device, which need not be the current one; other threads may use CUDA meanwhile.
            with (
                torch.cuda.device(self.decoder.device),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                logits = super().step(self.codes, column, self.row, self.place)
            self.graphs[column] = graph, logits
        graph, logits = self.graphs[column]
        graph.replay()
        return logits


def make_cache(decoder: Decoder, prompts: Prompts, batch: int) -> KVCache:
    """The kind of KVCache that suits the decoder's device."""
    kind = GraphedCache if decoder.device.type == "cuda" else KVCache
    return kind(decoder, prompts, batch)
