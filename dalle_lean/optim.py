"""LAMB with 8-bit statistics kept on the CPU.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dalle_lean.blockwise import dequantize, quantize


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices decay; vectors (biases, LayerNorm and LayerScale weights) do not.

    A tied parameter stands once.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.squeeze().ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.squeeze().ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


class Lamb(torch.optim.Optimizer):
    """LAMB: each tensor moves by `lr` times its own norm, in the direction that Adam with weight decay says.

    update = mean / (sqrt(square) + eps) + weight_decay * weight
    weight -= lr * min(|weight|, clamp_weight_norm) / |update| * update     (a ratio of 1 where either norm is 0)

    The two moving averages live on the CPU wherever the parameters are: in float32 below `min_eight_bit_numel`
    elements, else (`eight_bit`) as bytes in blocks of `block_size`. A step takes finite gradients of any float type,
    computes in float32, and leaves parameters without a gradient alone.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.96),
        eps: float = 1e-6,
        weight_decay: float = 0.045,
        clamp_weight_norm: float = 1e4,
        bias_correction: bool = False,
        eight_bit: bool = True,
        block_size: int = 4096,
        min_eight_bit_numel: int = 65536,
    ):
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be finite and at least 0")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: each must be at least 0 and below 1")
        if not clamp_weight_norm > 0:
            raise ValueError(f"clamp_weight_norm={clamp_weight_norm}: must be above 0")
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "clamp_weight_norm": clamp_weight_norm,
            "bias_correction": bias_correction,
            "eight_bit": eight_bit,
            "block_size": block_size,
            "min_eight_bit_numel": min_eight_bit_numel,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        beta_mean, beta_square = group["betas"]
        gradient = gradient.to("cpu", torch.float32)
        weight = parameter.to("cpu", torch.float32)
        state = self.state[parameter]
        mean, square = read_statistics(state, gradient, group["block_size"])
        mean.lerp_(gradient, 1 - beta_mean)
        square.mul_(beta_square).addcmul_(gradient, gradient, value=1 - beta_square)
        in_bytes = group["eight_bit"] and parameter.numel() >= group["min_eight_bit_numel"]
        state["step"] = state.get("step", 0) + 1
        write_statistics(state, mean, square, group["block_size"] if in_bytes else None)

        direction_scale = square_scale = 1.0
        if group["bias_correction"]:
            direction_scale = 1 / (1 - beta_mean ** state["step"])
            square_scale = 1 / (1 - beta_square ** state["step"])
        denominator = (square * square_scale).sqrt_().add_(group["eps"])
        update = (mean * direction_scale).div_(denominator).add_(weight, alpha=group["weight_decay"])
        weight_norm = float(torch.linalg.vector_norm(weight))
        update_norm = float(torch.linalg.vector_norm(update))
        ratio = 1.0
        if weight_norm > 0 and update_norm > 0:
            ratio = min(weight_norm, group["clamp_weight_norm"]) / update_norm
        parameter.add_(update.to(parameter.device), alpha=-group["lr"] * ratio)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict()` gave, bit for bit."""
        super().load_state_dict(state_dict)
        # torch has just cast the statistics to each parameter's dtype and device; ours are bytes, on the CPU.
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, parameter in zip(names, parameters, strict=True):
            if name in state_dict["state"]:
                saved = state_dict["state"][name]
                self.state[parameter] = {
                    key: value.cpu().clone() if isinstance(value, Tensor) else value for key, value in saved.items()
                }


def read_statistics(state: dict[str, Any], gradient: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """The moving averages (mean of the gradient, mean of its square) in float32; zeros before the first step."""
    if "mean_codes" in state:
        mean = dequantize(state["mean_codes"], state["mean_scales"], signed=True, block_size=block_size)
        square = dequantize(state["square_codes"], state["square_scales"], signed=False, block_size=block_size)
        return mean, square
    if "mean" in state:
        return state["mean"], state["square"]
    return torch.zeros_like(gradient), torch.zeros_like(gradient)


def write_statistics(state: dict[str, Any], mean: Tensor, square: Tensor, block_size: int | None) -> None:
    """Keep the moving averages: as bytes in blocks of `block_size`, or as they are (None)."""
    if block_size is None:
        state["mean"], state["square"] = mean, square
        return
    state["mean_codes"], state["mean_scales"] = quantize(mean, signed=True, block_size=block_size)
    state["square_codes"], state["square_scales"] = quantize(square, signed=False, block_size=block_size)
