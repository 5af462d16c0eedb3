"""The bare chain: a decoding step's products with weights and nothing else, a lower bound for any sampler.

R rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from dalle_lean import Dalle, DalleConfig
from inference.sampling.kv_layout import window_of
from inference.sampling.packed_decoder import PackedDecoder
from inference.sampling.packed_linear import Precision, compute_dtype

Chain = Callable[[], None]
WEIGHT_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}


def step_weights(model: Dalle) -> list[Tensor]:
    """The weights [out, in] of a step's products, in order: four per layer, then the output layer's rows for codes."""
    config = model.config
    weights = []
    for index in config.layer_blocks:
        attention, feed_forward = model.blocks[index].attention, model.blocks[index].feed_forward
        layers = (attention.qkv, attention.out, feed_forward.up, feed_forward.down)  # type: ignore[union-attr]
        weights += [layer.weight.detach() for layer in layers]  # type: ignore[union-attr, operator]
    return [*weights, model.output.weight.detach()[config.num_text_tokens :]]


def bare_chain(model: Dalle, batch: int) -> Chain:
    """A step's products, [R, in] by its weights, as torch computes them in their dtype."""
    weights = step_weights(model)
    inputs = random_inputs(weights, batch, model.output.weight.dtype)

    @torch.inference_mode()
    def run() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            linear(x, weight)

    return run


def packed_chain(decoder: PackedDecoder, batch: int) -> Chain:
    """The same products with the weights as `decoder` packs them, including biases."""
    inputs = random_inputs(step_weights(decoder.model), batch, compute_dtype(decoder.precision))
    products = [product for layer in decoder.layers for product in (layer.qkv, layer.out, layer.up, layer.down)]
    products.append(decoder.output)

    @torch.inference_mode()
    def run() -> None:
        for x, product in zip(inputs, products, strict=True):
            product(x)

    return run


def random_inputs(weights: list[Tensor], batch: int, dtype: torch.dtype) -> list[Tensor]:
    """An input [R, in] for each weight; inputs of the same width are one tensor, since a step's would be in cache."""
    device, widths = weights[0].device, [weight.shape[1] for weight in weights]
    by_width = {width: torch.randn(batch, width, device=device).to(dtype) for width in set(widths)}
    return [by_width[width] for width in widths]


def step_flop(model: Dalle, batch: int) -> int:
    """Multiplications and additions of a step's products with weights."""
    return 2 * batch * sum(weight.numel() for weight in step_weights(model))


def step_bytes(model: Dalle, precision: Precision, batch: int) -> int:
    """The fewest bytes that a step must read: every weight once, shared or not, the prompt's keys and values once, and
    for each picture those that a query sees."""
    weights = {weight.data_ptr(): weight.numel() for weight in step_weights(model)}
    return sum(weights.values()) * WEIGHT_BYTES[precision] + read_bytes(model.config, precision, batch)


def read_bytes(config: DalleConfig, precision: Precision, batch: int) -> int:
    """Bytes of keys and values that a step reads for `batch` pictures of one prompt."""
    windows = [window_of(config, kind) for kind in config.layer_kinds]
    cells = sum(config.num_text_positions + batch * window.span * window.rows for window in windows)
    return 2 * cells * config.num_heads * config.head_size * compute_dtype(precision).itemsize
