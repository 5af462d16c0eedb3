"""A decoding step on the CPU with the kernels of `step_kernel.py` between its products: three where torch needs twenty
operations. It is `PlainStep` up to rounding; attention is float32 in every precision.

R pictures (rows), N prompts, r rows of a prompt, H heads, d head size, P text positions, I codes in a picture, D hidden
size, C codebook.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inference.sampling import load_kernels
from inference.sampling.kv_layout import window_of
from inference.sampling.load_kernels import array
from inference.sampling.packed_decoder import BranchWeights, PackedDecoder, normalise
from inference.sampling.packed_linear import bind
from inference.sampling.plain_step import load_inputs
from inference.sampling.prefill import Prompts


def kernels_for(decoder: PackedDecoder) -> ModuleType | None:
    """The kernels, if they can take this decoder's steps."""
    fits = decoder.compiled and decoder.device.type == "cpu" and decoder.config.head_size % 2 == 0
    return load_kernels.kernels(decoder.dtype) if fits else None


class Products(NamedTuple):
    """A layer's products, from buffer to buffer."""

    qkv: Callable[[], object]
    out: Callable[[], object]
    up: Callable[[], object]
    down: Callable[[], object]


class CompiledStep:
    """Reads codes and keeps their keys, values and shifted inputs. All buffers are allocated once."""

    def __init__(self, kernels: ModuleType, decoder: PackedDecoder, prompts: Prompts, batch: int):
        """`batch` rows, an equal number for each prompt."""
        self.kernels, self.decoder, self.config = kernels, decoder, decoder.config
        config, dtype, heads = decoder.config, decoder.dtype, decoder.config.num_heads
        self.windows = {kind: window_of(config, kind) for kind in config.layer_kinds}
        windows = [self.windows[kind] for kind in config.layer_kinds]
        grid = (heads, prompts.count, batch // prompts.count)
        cells = [(*grid, window.columns, window.rows, config.head_size) for window in windows]
        self.keys, self.values = ([torch.zeros(shape, dtype=dtype) for shape in cells] for _ in range(2))
        channels = config.hidden_size // 2 if config.token_shift else 0
        self.inputs = torch.zeros(2 * config.num_layers, config.image_side, batch, channels)
        # A branch's input, attention's output, and the activation between the feed-forward's products.
        hidden = torch.zeros(batch, config.hidden_size, dtype=dtype)
        merged = hidden.new_zeros(batch, heads * config.head_size)
        self.activated = hidden.new_zeros(batch, config.ffn_multiplier * config.hidden_size)
        # A product's output: queries, keys and values, the feed-forward's upper product, and what a branch adds.
        qkv, self.delta = hidden.new_zeros(batch, 3 * merged.shape[1]), torch.zeros_like(hidden)
        self.up = hidden.new_zeros(batch, (1 + config.ffn_gated) * self.activated.shape[1])
        self.products = [
            Products(
                bind(layer.qkv, hidden, qkv),
                bind(layer.out, merged, self.delta),
                bind(layer.up, hidden, self.up),
                bind(layer.down, self.activated, self.delta),
            )
            for layer in decoder.layers
        ]
        self.has_geglu = config.ffn_gated and config.ffn_activation == "gelu"
        self.nothing = torch.zeros_like(hidden, dtype=torch.float32 if config.sandwich_norm else dtype)

        # The same as NumPy arrays, made once: a step takes hundreds.
        self.hidden_array, self.merged_array, self.qkv_array = array(hidden), array(merged), array(qkv)
        self.activated_array, self.inputs_array = array(self.activated), array(self.inputs)
        self.up_array, self.delta_array = array(self.up), array(self.delta)
        branches = [branch for layer in decoder.layers for branch in (layer.attention, layer.feed_forward)]
        self.scales = [array(branch.scale) for branch in branches]
        norms = [branch.norm for branch in branches]
        self.norms = [(array(weight), array(bias), np.float32(eps)) for weight, bias, eps in norms]
        self.biases = {kind: array(bias) for kind, bias in decoder.score_biases.items()}  # [I, n]
        factors = decoder.rotations.expand(-1, -1, config.head_size // 2).to(torch.complex64)
        self.rotations = array(torch.view_as_real(factors).flatten(2))  # [I, 3, d]
        self.load(prompts)

    @property
    def buffers(self) -> list[Tensor]:
        """All that is held for the codes read, and the prompts' transposed keys."""
        return [*self.keys, *self.values, self.inputs, *self.text_keys]

    def load(self, prompts: Prompts) -> None:
        """Take the prompts' keys and values, and write the codes given with them."""
        self.prompts, side = prompts, self.config.image_side
        self.text_keys = [keys.transpose(2, 3).contiguous() for keys, _ in prompts.text_kv]  # [H, N, d, P]
        for index, code_kv in enumerate(prompts.code_kv):
            window = self.windows[self.config.layer_kinds[index]]
            for first in range(0, prompts.num_codes, side):
                keys, values = code_kv[:, :, :, first : first + side].unsqueeze(3)  # [H, N, 1, columns, d]
                columns, slot = slice(window.left, window.left + keys.shape[3]), first // side % window.rows
                self.keys[index][:, :, :, columns, slot] = keys
                self.values[index][:, :, :, columns, slot] = values
        load_inputs(self.inputs, prompts)
        self.layer_arrays = [
            (
                array(keys.flatten(0, 4)),
                array(values.flatten(0, 4)),
                array(text_keys.flatten(0, 2)),
                array(text_values.flatten(0, 2)),
            )
            for keys, values, text_keys, (_, text_values) in zip(
                self.keys, self.values, self.text_keys, prompts.text_kv, strict=True
            )
        ]

    def __call__(self, codes: Tensor, column: int, row: int, place: Tensor) -> Tensor:
        """Read the codes [R] at `place` [1] -> float32 logits [R, C] of the codes after them."""
        decoder, count, place_index = self.decoder, self.prompts.count, row * self.config.image_side + column
        threads = torch.get_num_threads()
        self.kernels.use_threads(threads)
        a, b = decoder.streams(decoder.embed(codes, place))
        a_array, b_array = array(a), array(b)
        rotation = self.rotations[place_index]
        seen = {kind: seen_cells(bias[place_index]) for kind, bias in self.biases.items()}
        delta = self.nothing
        for index, layer in enumerate(decoder.layers):
            window, (masked, bias) = self.windows[layer.kind], seen[layer.kind]
            first, cell = window.first(column) * window.rows, (window.left + column) * window.rows + row % window.rows
            self._prepare(b_array, delta, 2 * index, column)
            products, (keys, values, *texts) = self.products[index], self.layer_arrays[index]
            cells = keys, values, bias, first + masked, cell
            products.qkv()
            self.kernels.step_kernel.attend(self.qkv_array, rotation, *cells, *texts, count, threads, self.merged_array)
            products.out()
            delta = normalised(layer.attention, self.delta)
            self._prepare(a_array, delta, 2 * index + 1, column)
            products.up()
            if self.has_geglu:
                self.kernels.step_kernel.geglu(self.up_array, self.activated_array)
            else:
                self.activated.copy_(layer.activate(self.up))
            products.down()
            delta = normalised(layer.feed_forward, self.delta)
        b.addcmul_(delta.float(), decoder.layers[-1].feed_forward.scale)
        return decoder.logits(a, b)

    def _prepare(self, stream: Any, delta: Tensor, branch: int, column: int) -> None:
        """Add the previous branch's output to its stream, and fill `hidden` with this branch's input."""
        added = self.delta_array if delta is self.delta else array(delta)
        scale = self.scales[branch - 1]  # for branch 0 any, as `delta` is zeros
        shifted = self.inputs_array, branch, column
        self.kernels.step_kernel.add_and_prepare(stream, added, scale, *self.norms[branch], *shifted, self.hidden_array)


def seen_cells(bias: Any) -> tuple[int, Any]:
    """How many cells are masked before the first that a code sees, and the biases from there to the last."""
    seen = np.flatnonzero(bias == 0)
    return int(seen[0]), bias[seen[0] : seen[-1] + 1]


def normalised(weights: BranchWeights, out: Tensor) -> Tensor:
    """What a branch adds to its stream, before the scale."""
    return out if weights.norm_out is None else normalise(weights.norm_out, out.float())
