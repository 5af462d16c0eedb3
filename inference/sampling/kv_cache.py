"""Decodes many pictures code by code, with a KV cache that holds only the keys each kind of attention needs.

R pictures (rows), N prompts with R / N pictures each, in the prompts' order (guidance counts each picture and prompt
twice: also with an empty caption); r rows of a prompt, rounded up to whole groups for attention; H heads, d head size,
P text positions, n cells read, f side of the picture, I codes in it, D hidden size, C codebook.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from inference.sampling.compiled_step import compiled_step
from inference.sampling.cuda_graphs import StepGraphs
from inference.sampling.kv_layout import window_of
from inference.sampling.packed_decoder import BranchWeights, LayerWeights, PackedDecoder, normalise
from inference.sampling.packed_linear import ROW_GROUP
from inference.sampling.prefill import Prompts

# A single row uses other kernels (matrix times vector), which round differently.
MIN_ROWS = 2


class LayerViews(NamedTuple):
    """The parts of the cache's buffers that a layer reads and writes for a code in one column."""

    keys: Tensor  # [H * N * r, d, n]
    values: Tensor  # [H * N * r, n, d]
    column_keys: Tensor  # cells of the column, to which its keys are written, [H, N, r, d, rows]
    column_values: Tensor  # the same of values, [H, N, r, rows, d]
    above: list[Tensor]  # for both branches, the channels that token shift takes from the code above, [R, D / 4]
    left: list[Tensor]  # the same from the left neighbour
    shifted: list[Tensor]  # for both branches, this code's channels for its neighbours, [R, D / 2]


class KVCache:
    """The state of decoding: keys, values and shifted inputs of the codes read. All buffers are allocated once."""

    def __init__(self, decoder: PackedDecoder, prompts: Prompts, batch: int):
        """`batch` pictures, an equal number for each prompt."""
        config, device = decoder.config, decoder.device
        assert batch % prompts.count == 0, "every prompt has as many pictures"
        self.decoder, self.prompts, self.config = decoder, prompts, config
        self.codes_read = 0
        self.pictures, batch = batch, max(batch, MIN_ROWS)
        self.batch, per_prompt = batch, batch // prompts.count
        heads, padded = config.num_heads, -(-per_prompt // ROW_GROUP) * ROW_GROUP
        grid = (heads, prompts.count, padded)
        self.windows = {kind: window_of(config, kind) for kind in config.layer_kinds}

        def buffer(*shape: int, dtype: torch.dtype = decoder.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        windows = [self.windows[kind] for kind in config.layer_kinds]
        self.keys = [buffer(*grid, config.head_size, window.columns, window.rows) for window in windows]
        self.values = [buffer(*grid, window.columns, window.rows, config.head_size) for window in windows]
        # For each column, the input of both branches of every layer at the code last read.
        channels = config.hidden_size // 2 if config.token_shift else 0
        branches = 2 * config.num_layers
        self.inputs = buffer(branches, config.image_side, batch, channels, dtype=torch.float32)
        self.no_left = buffer(batch, channels // 2, dtype=torch.float32)
        # Queries, keys and values of the present code, and its attention outputs.
        self.qkv = buffer(3, *grid, config.head_size, dtype=torch.float32)
        self.qkv_of_pictures = torch.view_as_complex(self.qkv.unflatten(-1, (-1, 2))) if config.rotary else self.qkv
        self.qkv_of_pictures = self.qkv_of_pictures[:, :, :, :per_prompt]
        self.key, self.value = self.qkv[1:]
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
        self.graphs = StepGraphs(batch, device) if device.type == "cuda" else None
        self._load(prompts)

    def restart(self, prompts: Prompts) -> None:
        """Start again from other prompts, as many as before, in the same buffers."""
        for text, other in zip(self.prompts.text_kv, prompts.text_kv, strict=True):
            text.copy_(other)
        for buffer in (*self.keys, *self.values, self.inputs):
            buffer.zero_()
        self._load(prompts)

    @property
    def num_bytes(self) -> int:
        """Bytes held for the codes read and for the prompts."""
        held = [*self.keys, *self.values, self.inputs, *self.prompts.text_kv]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @torch.inference_mode()
    def decode_step(self, codes: Tensor) -> Tensor:
        """Read the next code [R] of each picture -> float32 logits [R, C] of the code after it."""
        assert self.codes_read < self.config.image_len - 1, "nothing follows the last code"
        row, column = divmod(self.codes_read, self.config.image_side)
        place = torch.full((1,), self.codes_read, device=self.decoder.device)  # without waiting for the device
        arguments = codes.expand(self.batch), column, row, place
        if self.graphs:
            logits = self.graphs.run(self.step, *arguments)
        else:
            logits = self.compiled(*arguments) if self.compiled else self.step(*arguments)
        self.codes_read += 1
        return logits[: self.pictures]

    def step(self, codes: Tensor, column: int, row: int | Tensor, place: Tensor) -> Tensor:
        """`decode_step` at a given place [1]. With `row` as a tensor [1], the same operations serve all rows."""
        decoder = self.decoder
        a, b = decoder.streams(decoder.embed(codes, place))
        rotation = decoder.rotations.index_select(0, place).view(3, 1, 1, 1, -1)
        biases = {kind: bias.index_select(0, place) for kind, bias in decoder.score_biases.items()}
        for index, (layer, views) in enumerate(zip(decoder.layers, self._views(column), strict=True)):
            window = self.windows[layer.kind]
            self._project(layer, self._prepare(b, layer.attention, views, 0), rotation)
            slot = row % window.rows
            if isinstance(slot, Tensor):
                views.column_keys.index_copy_(4, slot, self.key.unsqueeze(4).to(views.keys.dtype))
                views.column_values.index_copy_(3, slot, self.value.unsqueeze(3).to(views.values.dtype))
            else:
                views.column_keys.select(4, slot).copy_(self.key)
                views.column_values.select(3, slot).copy_(self.value)
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

    def _views(self, column: int) -> list[LayerViews]:
        """The views of all layers for a column, made when a code in it is first read."""
        if column not in self.views:
            self.views[column] = [self._layer_views(layer, column) for layer in range(self.config.num_layers)]
        return self.views[column]

    def _layer_views(self, layer: int, column: int) -> LayerViews:
        window = self.windows[self.config.layer_kinds[layer]]
        first, flat = window.first(column), len(self.code_query)
        columns, own = slice(first, first + window.span), window.left + column
        keys, values = self.keys[layer], self.values[layer]
        quarter = self.inputs.shape[3] // 2
        inputs = self.inputs[2 * layer : 2 * layer + 2]
        return LayerViews(
            keys[:, :, :, :, columns].view(flat, -1, window.span * window.rows),
            values[:, :, :, columns].view(flat, window.span * window.rows, -1),
            keys[:, :, :, :, own],
            values[:, :, :, own],
            [branch[column, :, :quarter] for branch in inputs],
            [branch[column - 1, :, quarter:] if column > 0 else self.no_left for branch in inputs],
            [branch[column] for branch in inputs],
        )

    def _load(self, prompts: Prompts) -> None:
        side, num_codes = self.config.image_side, prompts.num_codes
        per_prompt = self.batch // prompts.count
        for index, code_kv in enumerate(prompts.code_kv):
            window = self.windows[self.config.layer_kinds[index]]
            for first in range(0, num_codes, side):
                keys, values = code_kv[:, :, :, first : first + side].unsqueeze(3)  # [H, N, 1, columns, d]
                columns, slot = slice(window.left, window.left + keys.shape[3]), first // side % window.rows
                self.keys[index][:, :, :, :, columns, slot] = keys.transpose(3, 4)
                self.values[index][:, :, :, columns, slot] = values
        if self.config.token_shift:
            for inputs, code_inputs in zip(self.inputs, prompts.code_inputs, strict=True):
                for first in range(0, num_codes, side):
                    line = code_inputs[:, first : first + side].repeat_interleave(per_prompt, dim=0)
                    inputs[: line.shape[1]] = line.transpose(0, 1)
        self.compiled = compiled_step(self)
        self.codes_read = num_codes


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
