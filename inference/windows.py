"""Which keys a decoder keeps for each kind of attention, and where.

A window is a small grid of cells, [columns, rows]: a code of the picture is written to the cell of its column and of
its row modulo the window's rows, so that what no query sees any more is overwritten. A row layer keeps one row, a
convolution layer the rows that its window reaches, a column or full layer all. A query reads whole columns of cells.

f side of the picture, I = f * f codes, n cells that a query reads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dalle_lean.attention import rows_above
from dalle_lean.config import DalleConfig
from dalle_lean.masks import attention_mask


@dataclass(frozen=True)
class Window:
    """The grid of cells of one kind of attention."""

    columns: int
    rows: int
    margin: int
    """Columns of cells beside the picture on either side, which are never seen."""
    span: int
    """Columns of cells that a query reads: its own with the margin around it, or all."""

    def first(self, column: int) -> int:
        """The first column of cells that a query in this column reads."""
        return column if self.span < self.columns else 0

    @property
    def cells(self) -> int:
        """Keys kept, for each picture and head."""
        return self.columns * self.rows


def window_of(config: DalleConfig, kind: str) -> Window:
    """The least that a kind of attention needs."""
    side = config.image_side
    if kind == "row":
        return Window(columns=side, rows=1, margin=0, span=side)
    if kind == "column":
        return Window(columns=side, rows=side, margin=0, span=1)
    if kind == "conv":
        reach = config.conv_kernel // 2 if config.conv_window == "centred" else config.conv_kernel - 1
        return Window(side + 2 * reach, min(rows_above(config) + 1, side), reach, 2 * reach + 1)
    return Window(columns=side, rows=side, margin=0, span=side)


def window_places(window: Window, side: int) -> Tensor:
    """Which code each cell holds when the query at a place reads it: [I, n] places, -1 for none."""
    places = torch.full((side * side, window.span, window.rows), -1)
    for query in range(side * side):
        row, column = divmod(query, side)
        for position in range(window.span):
            key_column = window.first(column) + position - window.margin
            if 0 <= key_column < side:
                # The newest row that was written to the slot: this row up to the query, else `rows` earlier.
                for slot in range(window.rows):
                    key_row = row - (row - slot) % window.rows
                    key_row -= window.rows if key_row == row and key_column > column else 0
                    if key_row >= 0:
                        places[query, position, slot] = key_row * side + key_column
    return places.flatten(1)


def window_mask(config: DalleConfig, kind: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of the cells that a query reads: [I, n], 0 for seen keys, -inf for others."""
    places = window_places(window_of(config, kind), config.image_side)
    start = config.num_text_positions
    is_seen = attention_mask(config, kind)[start:, start:].gather(1, places.clamp(min=0)) & (places >= 0)
    return torch.zeros(places.shape, dtype=dtype).masked_fill(~is_seen, -torch.inf).to(device)
