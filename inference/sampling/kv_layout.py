"""Which keys a decoder keeps for each kind of attention, and where.

A window is a small grid of cells, [columns, rows]: a code of the picture is written to the cell of its column and of
its row modulo the window's rows, which overwrites codes that no query sees any more. A row layer keeps one row, a
convolution layer the rows that its window reaches, a column or full layer all. A query reads whole columns of cells.

f side of the picture, I = f * f codes, n cells that a query reads, S positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dalle_lean.model.config import DalleConfig
from dalle_lean.model.masks import code_sees_code


@dataclass(frozen=True)
class Window:
    """The grid of cells of one kind of attention."""

    columns: int
    rows: int
    left: int  # columns of cells to the left of the picture, always masked
    span: int  # columns of cells that a query reads, from `left` columns before its own; or all columns

    def first(self, column: int) -> int:
        """The first column of cells that a query in this column reads."""
        return column if self.span < self.columns else 0

    @property
    def cells(self) -> int:
        """Keys kept per picture and head."""
        return self.columns * self.rows


def window_of(config: DalleConfig, kind: str) -> Window:
    """The smallest grid of cells that holds all that a kind's queries may attend to."""
    side = config.image_side
    if kind == "row":
        return Window(columns=side, rows=1, left=0, span=side)
    if kind == "column":
        return Window(columns=side, rows=side, left=0, span=1)
    if kind == "conv":
        back, right = config.conv_reach  # as far back in rows as in columns
        rows = min(back + 1, side)
        if back + 1 + right < side:
            return Window(columns=back + side + right, rows=rows, left=back, span=back + 1 + right)
        return Window(columns=side, rows=rows, left=0, span=side)
    return Window(columns=side, rows=side, left=0, span=side)


def window_places(window: Window, side: int) -> Tensor:
    """The place of the code in each cell that the query at a place reads, [I, n]; -1 if the cell holds none."""
    query = torch.arange(side * side)[:, None, None]
    row, column = query // side, query % side
    slot = torch.arange(window.rows)
    first = column if window.span < window.columns else torch.zeros_like(column)
    key_column = first - window.left + torch.arange(window.span)[:, None]  # [I, span, 1]
    # The newest row written to the slot: the query's own row only up to the query, otherwise an earlier one.
    key_row = row - (row - slot) % window.rows
    key_row = torch.where((key_row == row) & (key_column > column), row - window.rows, key_row)
    is_code = (key_column >= 0) & (key_column < side) & (key_row >= 0)
    return torch.where(is_code, key_row * side + key_column, -1).flatten(1)


def score_bias(config: DalleConfig, kind: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The bias of the scores of the cells that a query reads, [I, n]: 0 where it may attend, else -inf."""
    places = window_places(window_of(config, kind), config.image_side)
    mask = code_sees_code(config, kind, config.image_side, torch.arange(config.image_len)[:, None], places)
    return torch.zeros(places.shape, dtype=dtype).masked_fill(~mask, -torch.inf).to(device)


def biases_bytes(config: DalleConfig, dtype: torch.dtype) -> int:
    """Approximate peak RAM to make all biases: those of each kind, and the temporaries of the largest."""
    kept, most = 0, 0
    for kind in dict.fromkeys(config.layer_kinds):
        window = window_of(config, kind)
        pairs = config.image_len * window.span * window.rows
        kept += pairs * dtype.itemsize
        most = max(most, pairs * 36)  # places, rows and columns are int64
    return kept + most
