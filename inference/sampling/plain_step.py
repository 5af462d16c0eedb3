"""A decoding step in plain torch: on CUDA, and on a CPU without the kernels of `compiled_step.py`.

R pictures (rows), N prompts with R / N pictures each, r rows of a prompt, rounded up to whole groups for attention;
H heads, d head size, P text positions, n cells read, f side of the picture, D hidden size, C codebook.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.sampling.kv_layout import window_of
from inference.sampling.packed_decoder import BranchWeights, LayerWeights, PackedDecoder, normalise
from inference.sampling.packed_linear import ROW_GROUP
from inference.sampling.prefill import Prompts


class LayerViews(NamedTuple):
    """The parts of the cache's buffers that a layer reads and writes for a code in one column."""

    keys: Tensor  # [H * N * r, d, n]
    values: Tensor  # [H * N * r, n, d]
    column_cells: Tensor  # cells of the column, to which its keys and values are written, [2, H, N, r, rows, d]
    above: list[Tensor]  # for both branches, the channels that token shift takes from the code above, [R, D / 4]
    left: list[Tensor]  # the same from the left neighbour
    shifted: list[Tensor]  # for both branches, this code's channels for its neighbours, [R, D / 2]


class PlainStep:
    """Reads codes and keeps their keys, values and shifted inputs. All buffers are allocated once."""

    def __init__(self, decoder: PackedDecoder, prompts: Prompts, batch: int):
        """`batch` rows, an equal number for each prompt."""
        config, device = decoder.config, decoder.device
        self.decoder, self.prompts, self.config = decoder, prompts, config
        heads, per_prompt = config.num_heads, batch // prompts.count
        padded = -(-per_prompt // ROW_GROUP) * ROW_GROUP
        grid = (heads, prompts.count, padded)
        self.windows = {kind: window_of(config, kind) for kind in config.layer_kinds}

        def buffer(*shape: int, dtype: torch.dtype = decoder.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.cells = []
        for kind in config.layer_kinds:
            window = self.windows[kind]
            self.cells.append(buffer(2, *grid, window.columns, window.rows, config.head_size))
        # For each column, the input of both branches of every layer at the code last read.
        channels = config.hidden_size // 2 if config.token_shift else 0
        branches = 2 * config.num_layers
        self.inputs = buffer(branches, config.image_side, batch, channels, dtype=torch.float32)
        self.no_left = buffer(batch, channels // 2, dtype=torch.float32)
        # Queries, keys and values of the present code, and its attention outputs.
        self.qkv = buffer(3, *grid, config.head_size, dtype=torch.float32)
        self.qkv_of_pictures = torch.view_as_complex(self.qkv.unflatten(-1, (-1, 2))) if config.rotary else self.qkv
        self.qkv_of_pictures = self.qkv_of_pictures[:, :, :, :per_prompt]
        self.key_value = self.qkv[1:]
        flat = heads * prompts.count * padded
        self.query = self.qkv[0] if decoder.dtype == torch.float32 else buffer(*grid, config.head_size)
        self.text_query = self.query.view(heads * prompts.count, padded, -1)
        self.code_query = self.query.view(flat, 1, -1)
        self.attended = buffer(flat, 1, config.head_size)
        self.attended_of_pictures = self.attended.view(*grid, -1)[:, :, :per_prompt].permute(1, 2, 0, 3)
        self.merged = buffer(batch, heads * config.head_size)
        flat_texts = (kv.flatten(1, 2) for kv in prompts.text_kv)
        self.texts = [(keys.transpose(1, 2), values) for keys, values in flat_texts]
        self.views: dict[int, list[LayerViews]] = {}
        self.load(prompts)

    @property
    def buffers(self) -> list[Tensor]:
        """All that is held for the codes read."""
        return [*self.cells, self.inputs]

    def restart(self, prompts: Prompts) -> None:
        """Start again from other prompts, as many as before, in the same buffers."""
        for text, other in zip(self.prompts.text_kv, prompts.text_kv, strict=True):
            text.copy_(other)
        for buffer in self.buffers:
            buffer.zero_()
        self.load(prompts)

    def __call__(self, codes: Tensor, column: int, row: int | Tensor, place: Tensor) -> Tensor:
        """Read the codes [R] at `place` [1] -> float32 logits [R, C] of the codes after them.

        With `row` as a tensor [1], the same operations serve all rows.
        """
        decoder = self.decoder
        if column not in self.views:
            self.views[column] = [self._layer_views(layer, column) for layer in range(self.config.num_layers)]
        a, b = decoder.streams(decoder.embed(codes, place))
        rotation = decoder.rotations.index_select(0, place).view(3, 1, 1, 1, -1)
        biases = {kind: bias.index_select(0, place) for kind, bias in decoder.score_biases.items()}
        for index, (layer, views) in enumerate(zip(decoder.layers, self.views[column], strict=True)):
            window = self.windows[layer.kind]
            self._project(layer, self._prepare(b, layer.attention, views, 0), rotation)
            if isinstance(row, Tensor):
                slot = row % window.rows
                cells = views.column_cells
                cells.index_copy_(4, slot, self.key_value.unsqueeze(4).to(cells.dtype))
            else:
                views.column_cells.select(4, row % window.rows).copy_(self.key_value)
            layer.attention.add(a, layer.out(self._attend(index, views, biases[layer.kind])))
            layer.feed_forward.add(b, layer.feed(self._prepare(a, layer.feed_forward, views, 1)))
        return decoder.logits(a, b)

    def _prepare(self, stream: Tensor, weights: BranchWeights, views: LayerViews, branch: int) -> Tensor:
        """The normalised and token-shifted stream [R, D]."""
        h = normalise(weights.norm, stream)
        if self.config.token_shift:
            shifted, kept = h.chunk(2, dim=1)
            h = torch.cat([views.above[branch], views.left[branch], kept], dim=1)
            views.shifted[branch].copy_(shifted)
        return h.to(self.decoder.dtype)

    def _project(self, layer: LayerWeights, x: Tensor, rotation: Tensor) -> None:
        """Fill `qkv` from attention's input [R, D], rotated and with scaled queries."""
        count, heads = self.prompts.count, self.config.num_heads
        if self.config.rotary:
            projected = torch.view_as_complex(layer.qkv(x).float().view(count, -1, 3, heads, rotation.shape[-1], 2))
        else:
            projected = layer.qkv(x).float().view(count, -1, 3, heads, self.config.head_size)
        torch.mul(projected.permute(2, 3, 0, 1, 4), rotation, out=self.qkv_of_pictures)
        if self.query.dtype != torch.float32:
            self.query.copy_(self.qkv[0])

    def _attend(self, layer: int, views: LayerViews, bias: Tensor) -> Tensor:
        """One softmax over the prompt's keys, shared by its pictures, and the cells of each picture -> [R, H * d]."""
        text_keys, text_values = self.texts[layer]
        num_text, flat = text_keys.shape[2], len(self.code_query)
        on_text = torch.bmm(self.text_query, text_keys)  # [H * N, r, P]
        on_codes = torch.baddbmm(bias, self.code_query, views.keys)  # [H * N * r, 1, n]
        scores = torch.cat([on_text.view(flat, 1, num_text), on_codes], dim=2)
        weights = scores.softmax(dim=2, dtype=torch.float32).to(scores.dtype)
        on_text, on_codes = weights.split([num_text, on_codes.shape[2]], dim=2)
        on_text = torch.bmm(on_text.view((*self.text_query.shape[:2], num_text)), text_values)
        torch.baddbmm(on_text.view(self.attended.shape), on_codes, views.values, out=self.attended)
        self.merged.view(self.attended_of_pictures.shape).copy_(self.attended_of_pictures)
        return self.merged

    def _layer_views(self, layer: int, column: int) -> LayerViews:
        """The views for a column, made when a code in it is first read."""
        window = self.windows[self.config.layer_kinds[layer]]
        first, flat = window.first(column), len(self.code_query)
        cells = self.cells[layer][:, :, :, :, first : first + window.span]
        keys, values = cells.flatten(1, 3).view(2, flat, window.span * window.rows, -1)
        quarter = self.inputs.shape[3] // 2
        inputs = self.inputs[2 * layer : 2 * layer + 2]
        return LayerViews(
            keys.transpose(1, 2),
            values,
            self.cells[layer][:, :, :, :, window.left + column],
            [branch[column, :, :quarter] for branch in inputs],
            [branch[column - 1, :, quarter:] if column > 0 else self.no_left for branch in inputs],
            [branch[column] for branch in inputs],
        )

    def load(self, prompts: Prompts) -> None:
        """Write the codes given with the prompts."""
        side, num_codes = self.config.image_side, prompts.num_codes
        for index, code_kv in enumerate(prompts.code_kv):
            window = self.windows[self.config.layer_kinds[index]]
            for first in range(0, num_codes, side):
                line = code_kv[:, :, :, first : first + side].unsqueeze(3)  # [2, H, N, 1, columns, d]
                columns = slice(window.left, window.left + line.shape[4])
                self.cells[index][:, :, :, :, columns, first // side % window.rows] = line
        load_inputs(self.inputs, prompts)


def load_inputs(inputs: Tensor, prompts: Prompts) -> None:
    """Write the given codes' channels for their neighbours into `inputs` [branches, f, R, D / 2]; nothing without token
    shift."""
    side, per_prompt = inputs.shape[1], inputs.shape[2] // prompts.count
    if inputs.shape[3]:
        for branch, code_inputs in zip(inputs, prompts.code_inputs, strict=True):
            for first in range(0, prompts.num_codes, side):
                line = code_inputs[:, first : first + side].repeat_interleave(per_prompt, dim=0)
                branch[: line.shape[1]] = line.transpose(0, 1)
