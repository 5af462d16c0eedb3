"""Decoding steps as CUDA graphs: one call launches hundreds of small kernels.

The operations of a step depend on the column of the code that it reads, and on the row only through tensors. So there
is one graph per column, recorded the second time that this column is read. R pictures, C codebook.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor, int, int | Tensor, Tensor], Tensor]
"""codes [R], column, row as a number or [1], place [1] -> logits [R, C]."""


class StepGraphs:
    """The graphs of one cache's step on a CUDA device."""

    def __init__(self, batch: int, device: torch.device):
        self.device = device
        self.codes = torch.zeros(batch, dtype=torch.long, device=device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self.row = torch.zeros(1, dtype=torch.long, device=device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # Graphs of one cache never run at the same time, so they share their memory.
        self.pool = torch.cuda.graph_pool_handle()
        self.warmed_up: set[int] = set()

    def run(self, step: Step, codes: Tensor, column: int, row: int, place: Tensor) -> Tensor:
        """The step's logits, which the next call overwrites."""
        self.codes.copy_(codes)
        self.place.copy_(place)
        self.row.fill_(row)
        if column not in self.warmed_up:
            # In their first run libraries initialise themselves, which cannot be recorded.
            self.warmed_up.add(column)
            return step(self.codes, column, self.row, self.place)
        if column not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            # On this device, which need not be the current one; other threads may use CUDA meanwhile.
            with (
                torch.cuda.device(self.device),
                torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
            ):
                logits = step(self.codes, column, self.row, self.place)
            self.graphs[column] = graph, logits
        graph, logits = self.graphs[column]
        graph.replay()
        return logits
