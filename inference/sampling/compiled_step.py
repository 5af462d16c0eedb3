"""A decoding step on the CPU with the kernels of `kernels.py` between its products: three where torch needs twenty
operations. `KVCache.step` is the same in plain torch.

R pictures, C codebook, D hidden size, H heads, d head size, N prompts, P text positions, I codes in a picture.
"""

import importlib
import warnings
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from inference.sampling.packed_decoder import BranchWeights, LayerWeights, normalise

if TYPE_CHECKING:
    from inference.sampling.kv_cache import KVCache


@cache
def kernels() -> ModuleType | None:
    """The compiled kernels; None without numba, and with a warning if numba is installed but does not work."""
    try:
        module = importlib.import_module("inference.sampling.kernels")
        module.geglu(np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32))
    except ModuleNotFoundError:
        return None
    except (ImportError, ValueError) as error:
        warnings.warn(f"numba cannot be used, drawing on the CPU will be slower: {error}", stacklevel=2)
        return None
    return module


def compiled_step(cache: "KVCache") -> "CompiledStep | None":
    """None where the kernels cannot be used."""
    decoder = cache.decoder
    if decoder.device.type != "cpu" or not decoder.compiled or cache.config.head_size % 2:
        return None
    module = kernels()
    return CompiledStep(cache, module) if module else None


class CompiledStep:
    """`KVCache.step` for one cache."""

    def __init__(self, cache: "KVCache", kernels: ModuleType):
        self.decoder, self.windows, self.kernels = cache.decoder, cache.windows, kernels
        decoder, config = cache.decoder, cache.config
        hidden = torch.empty(cache.batch, config.hidden_size, dtype=decoder.dtype)
        self.hidden, self.hidden_array = hidden, array(hidden)
        self.merged, self.merged_array = cache.merged, array(cache.merged)
        self.has_geglu = config.ffn_gated and config.ffn_activation == "gelu"
        self.activated = torch.empty(cache.batch, config.ffn_multiplier * config.hidden_size, dtype=decoder.dtype)
        self.activated_array = array(self.activated)
        self.nothing, self.inputs = torch.zeros_like(hidden), array(cache.inputs)
        self.biases = {kind: array(bias) for kind, bias in decoder.score_biases.items()}
        factors = decoder.rotations.expand(-1, -1, config.head_size // 2).to(torch.complex64)
        self.rotations = array(torch.view_as_real(factors).flatten(2))
        self.keys = [array(keys.view(-1, keys.shape[4] * keys.shape[5])) for keys in cache.keys]
        self.values = [array(values.view(-1, config.head_size)) for values in cache.values]
        texts = cache.prompts.text_kv
        self.text_keys = [array(keys.transpose(2, 3).flatten(0, 2).contiguous()) for keys, _ in texts]
        self.text_values = [array(values.flatten(0, 2)) for _, values in texts]
        self.prompts = cache.prompts.count

    def __call__(self, codes: Tensor, column: int, row: int, place: Tensor) -> Tensor:
        decoder, kernels = self.decoder, self.kernels
        config = decoder.config
        kernels.use_threads(torch.get_num_threads())
        a, b = decoder.streams(decoder.embed(codes, place))
        rotation = self.rotations[row * config.image_side + column]
        delta, scale = self.nothing, decoder.layers[0].attention.scale
        for index, layer in enumerate(decoder.layers):
            window, bias = self.windows[layer.kind], self.biases[layer.kind][row * config.image_side + column]
            first, cell = window.first(column) * window.rows, (window.left + column) * window.rows + row % window.rows
            self._prepare(b, delta, scale, layer.attention, 2 * index, column)
            cells = self.keys[index], self.values[index], bias, first, cell
            texts = self.text_keys[index], self.text_values[index]
            kernels.attend(array(layer.qkv(self.hidden)), rotation, *cells, *texts, self.prompts, self.merged_array)
            delta = normalised(layer.attention, layer.out(self.merged))
            self._prepare(a, delta, layer.attention.scale, layer.feed_forward, 2 * index + 1, column)
            delta, scale = normalised(layer.feed_forward, self._feed(layer)), layer.feed_forward.scale
        b.addcmul_(delta.float(), scale)
        return decoder.logits(a, b)

    def _prepare(
        self, stream: Tensor, delta: Tensor, scale: Tensor, weights: BranchWeights, branch: int, column: int
    ) -> None:
        """Add a branch's output to its stream, and fill `hidden` with the next branch's input."""
        weight, bias, eps = weights.norm
        added = array(stream), array(delta), array(scale)
        norm = array(weight), array(bias), np.float32(eps)
        self.kernels.add_and_prepare(*added, *norm, self.inputs, branch, column, self.hidden_array)

    def _feed(self, layer: LayerWeights) -> Tensor:
        """The feed-forward's inner module of `hidden`."""
        up = layer.up(self.hidden)
        if not self.has_geglu:
            return layer.down(layer.activate(up))
        self.kernels.geglu(array(up), self.activated_array)
        return layer.down(self.activated)


def normalised(weights: BranchWeights, out: Tensor) -> Tensor:
    """What a branch adds to its stream, before the scale."""
    return out if weights.norm_out is None else normalise(weights.norm_out, out.float())


def array(tensor: Tensor) -> Any:
    """The tensor's numbers as a NumPy array; bfloat16 as its bits, uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
