"""Projections for sampling, with weights converted and packed once for many small products.

R rows.
"""

import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from dalle_lean.errors import UserError
from dalle_lean.precision import onednn_multiplies_bf16
from inference.sampling import load_kernels
from inference.sampling.load_kernels import array

Precision = Literal["fp32", "bf16", "fp16", "int8"]
"""Of weights and activations; with int8 the activations are float32, rounded to bytes for each product."""

Projection = Callable[[Tensor], Tensor]  # [R, in] -> [R, out]

# Products of fewer rows use other kernels, which round differently; whole groups of rows all round alike.
ROW_GROUP = 8


def check_precision(precision: str, device: torch.device) -> None:
    """ValueError unless the device supports this precision."""
    if precision not in get_args(Precision):
        raise UserError(f"precision={precision!r}: it must be one of {', '.join(get_args(Precision))}")
    if precision == "fp16" and device.type == "cpu":
        raise UserError("precision='fp16': a CPU has no fast float16; use fp32, bf16 or int8")
    if precision == "int8" and device.type != "cpu":
        raise UserError("precision='int8': supported only on a CPU; use bf16 or fp16")


def fastest_precision(device: torch.device) -> Precision:
    """The faster of fp32 and bf16: bf16 on a GPU, and on a CPU that multiplies it without conversion."""
    multiplies_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if device.type != "cpu" or (multiplies_bf16 and can_pack(torch.bfloat16)) else "fp32"


def compute_dtype(precision: Precision) -> torch.dtype:
    """The dtype of projections' inputs and outputs in this precision."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


class PanelLinear:
    """A dense layer on a CPU by the kernels' own product: a row's result does not depend on the others."""

    def __init__(self, kernels: ModuleType, weight: Tensor, bias: Tensor | None, precision: Precision):
        self.kernels, self.weight, self.dtype = kernels, weight, compute_dtype(precision)
        products = kernels.matmul_kernel
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias
        if precision == "int8":
            self.multiply, weights = products.multiply_int8, products.to_int8_panels(weight.float())
        else:
            self.multiply, weights = products.multiply, [products.to_panels(weight.to(self.dtype))]
        self.weights = *weights, array(self.bias.float().contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        if load_kernels.forked:
            return _in_groups(x, lambda x: linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)))
        self.kernels.use_threads(torch.get_num_threads())
        out = x.new_empty(len(x), len(self.bias))
        self.bind(x.contiguous(), out)()
        return out

    def bind(self, x: Tensor, out: Tensor) -> Callable[[], None]:
        """A function that writes the layer of what x [R, in] holds at each call to `out` [R, out], by the threads that
        numba uses."""
        # The kernel reads and writes as many numbers as there are weights, one after the other, whatever it is given.
        assert (x.dtype, x.shape[1]) == (self.dtype, self.weight.shape[1]), f"{x.dtype} {list(x.shape)}"
        assert (out.dtype, out.shape) == (self.dtype, (len(x), len(self.bias))), f"{out.dtype} {list(out.shape)}"
        assert x.is_contiguous()
        assert out.is_contiguous()
        return partial(self.multiply, self.kernels.matmul_kernel.units_of(x), *self.weights, array(out))


def bind(project: Projection, x: Tensor, out: Tensor) -> Callable[[], object]:
    """A function that writes `project` of what x [R, in] holds at each call to `out` [R, out]."""
    return project.bind(x, out) if isinstance(project, PanelLinear) else lambda: out.copy_(project(x))


def pack(layer: nn.Module, precision: Precision, compiled: bool = True) -> Projection:
    """`layer` as a function [R, in] -> [R, out] in the precision's dtype. On a CPU in fp32 and bf16, a row's result
    does not depend on the number of rows. compiled: by numba's kernels where they can be used."""
    if not isinstance(layer, nn.Linear):
        tensors = {name: tensor.detach().to(compute_dtype(precision)) for name, tensor in layer.named_parameters()}
        return lambda x: _in_groups(x, lambda x: torch.func.functional_call(layer, tensors, x))
    bias = None if layer.bias is None else layer.bias.detach()
    return pack_dense(layer.weight.detach(), bias, precision, compiled)


def pack_dense(weight: Tensor, bias: Tensor | None, precision: Precision, compiled: bool = True) -> Projection:
    """`pack` of a linear layer with the weight [out, in] and the bias [out]."""
    if precision == "int8" and weight.shape[1] > 2**16:
        precision = "fp32"  # the sum of so many products of bytes could overflow
    dtype = compute_dtype(precision)
    weights_dtype = torch.int8 if precision == "int8" else dtype
    module = load_kernels.kernels(weights_dtype) if compiled and weight.device.type == "cpu" else None
    if module is not None and module.matmul_kernel.multiplies(weight.shape, weights_dtype):
        return PanelLinear(module, weight, bias, precision)
    if precision == "int8":
        return _int8(weight, bias)
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    if weight.device.type != "cpu":
        return lambda x: linear(x, weight, bias)
    if can_pack(dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROW_GROUP)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], None)
    return lambda x: _in_groups(x, lambda x: linear(x, weight, bias))


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of this dtype on this processor."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    return dtype != torch.bfloat16 or onednn_multiplies_bf16()


def _int8(weight: Tensor, bias: Tensor | None) -> Projection:
    """A product of 8-bit weights, with one scale per output, and 8-bit inputs, with one scale for all."""
    weight = weight.float()
    scales = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():  # deprecated, but the other int8 products are slower than float32
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantized, None if bias is None else bias.float())
    # Without VNNI instructions, sums of 8-bit products saturate at 16 bits; with 7-bit inputs they do not.
    narrow = not torch.cpu._is_vnni_supported()
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, narrow)


def _in_groups(x: Tensor, project: Projection) -> Tensor:
    missing = -len(x) % ROW_GROUP
    return project(pad(x, (0, 0, 0, missing)))[: len(x)] if missing else project(x)
