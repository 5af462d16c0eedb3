"""LAMB with 8-bit statistics kept on the CPU.

Source: You et al. 2020, "Large Batch Optimization for Deep Learning", algorithm 2.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dalle_lean.errors import UserError
from dalle_lean.optim.lamb_settings import check_number, check_settings
from dalle_lean.optim.lamb_step import StepSettings, new_statistics, step_plain
from dalle_lean.optim.quantize8 import CPU
from dalle_lean.require import require

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


@cache
def has_numba() -> bool:
    """Whether the compiled step can be used; warns if numba is installed but does not work."""
    try:
        importlib.import_module("dalle_lean.optim.lamb_numba")
    except ModuleNotFoundError:
        return False
    except ImportError as error:
        warnings.warn(f"numba cannot be used, LAMB's steps will be slower: {error}", stacklevel=2)
        return False
    return True


@cache
def keep_compiler_out() -> None:
    """Keep torch's optimizers from importing torch's compiler, which takes over a second at their first use. They
    import it only to exempt their methods from compilation, and nothing here compiles what calls them."""
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            setattr(method, "__dynamo_disable", method)


class Lamb(torch.optim.Optimizer):
    """LAMB: each tensor moves by `lr` times its own norm, in the direction of Adam with weight decay.

    update = mean / (sqrt(square) + eps) + weight_decay * weight
    weight -= lr * min(|weight|, clamp_weight_norm) / |update| * update     (a ratio of 1 where either norm is 0)

    The two moving averages are float32 below `min_eight_bit_numel` elements, otherwise (with `eight_bit`) bytes in
    blocks of `block_size` that keep zeros exact. A step takes gradients of any float type, computes in float32 and
    skips parameters without a gradient. It refuses a tensor with numbers that are not finite before changing it, but
    such a step is partial: earlier tensors have moved, later ones have not.

    Parameters sharded over processes (FSDP) move by the norms of the whole tensor.

    Args:
        offload: statistics (and `master_weights`) on the CPU; False is on each parameter's device.
        master_weights: keep a float32 copy of bfloat16 and float16 parameters, update it, round it into the parameter.
            If a weight is changed from outside, its copy follows.
        fused: compiled by numba, for 8-bit statistics on the CPU; None: if numba is installed.

    These three change the result by rounding only and are not part of the state dict.

    Raises:
        ValueError: a setting out of range; at a step, a number that is not finite.
        MissingPackage: `fused=True` without numba.
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
        *,
        offload: bool = True,
        master_weights: bool = False,
        fused: bool | None = None,
    ):
        if fused:
            require("numba", "training")
        keep_compiler_out()
        self.offload = offload
        self.master_weights = master_weights
        self.fused = fused
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

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("offload", "master_weights", "fused")}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a parameter listed twice in the group (tied) is updated once."""
        params = param_group["params"]
        if not isinstance(params, Tensor):
            param_group["params"] = list(dict.fromkeys(params))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_number(group, "lr")
        check_settings(group)
        sharded = [parameter for parameter in group["params"] if is_sharded(parameter)]
        if sharded and (group["eight_bit"] or self.offload or any(p.dtype != torch.float32 for p in sharded)):
            raise UserError("sharded parameters (FSDP): must be float32, with eight_bit=False and offload=False")

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
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """The step of one parameter, on the device of its statistics."""
        device = CPU if self.offload else parameter.device
        precision = torch.promote_types(parameter.dtype, torch.float32)
        state = self.state[parameter]
        if self.master_weights and parameter.dtype != precision:
            weight = sync_master(state, parameter.to(device))
        else:
            weight = local(parameter.detach()).to(device, precision).contiguous()
        if "step" not in state:
            in_bytes = group["eight_bit"] and parameter.numel() >= group["min_eight_bit_numel"]
            like = parameter if is_sharded(parameter) else weight
            state.update(new_statistics(like, block_size=group["block_size"] if in_bytes else None), step=0)
        check_state(state, parameter, group["block_size"])
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise ValueError(f"parameter of shape {list(parameter.shape)}: LAMB takes no sparse gradients")
        # Moved before it is converted: a 16-bit gradient has half the bytes.
        gradient = local(gradient.detach()).to(device).to(precision).contiguous()
        fits = "mean_codes" in state and device.type == "cpu" and precision == torch.float32
        settings = step_settings(group, step=state["step"] + 1)
        try:
            if fits and (has_numba() if self.fused is None else self.fused):
                from dalle_lean.optim.lamb_numba import step_fused

                step_fused(weight.view(-1), gradient.view(-1), state, settings)
            else:
                shards = {name: local(value) if isinstance(value, Tensor) else value for name, value in state.items()}
                total = all_reduce_sum(parameter)
                step_plain(weight.view(-1), gradient.view(-1), shards, settings, total=total)
        except UserError as error:
            raise UserError(f"parameter of shape {list(parameter.shape)}: {error}") from None
        state["step"] += 1
        if weight.data_ptr() == local(parameter).data_ptr():
            torch.autograd.graph.increment_version(parameter)  # numba wrote where autograd does not look
        else:
            local(parameter).copy_(weight)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of `state_dict`, bit for bit; ValueError if a state does not fit its parameter."""
        # torch would cast the statistics to each parameter's dtype and device.
        super().load_state_dict({**state_dict, "state": {}})
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        pairs = ((parameter, group) for group in self.param_groups for parameter in group["params"])
        for name, (parameter, group) in zip(names, pairs, strict=True):
            if name in state_dict["state"]:
                device = CPU if self.offload else parameter.device
                self.state[parameter] = {
                    key: value.to(device, copy=True).contiguous() if isinstance(value, Tensor) else value
                    for key, value in state_dict["state"][name].items()
                }
                check_state(self.state[parameter], parameter, group["block_size"])


def step_settings(group: dict[str, Any], *, step: int) -> StepSettings:
    """The settings of a group's step; the first step is 1."""
    beta_mean, beta_square = group["betas"]
    names = ("eps", "weight_decay", "clamp_weight_norm", "block_size")
    others = {name: group[name] for name in names}
    if group["bias_correction"]:
        others["mean_correction"] = 1 / (1 - beta_mean**step)
        others["square_correction"] = 1 / (1 - beta_square**step)
    return StepSettings(lr=float(group["lr"]), beta_mean=beta_mean, beta_square=beta_square, **others)


def sync_master(state: dict[str, Any], low: Tensor) -> Tensor:
    """The float32 master copy of low-precision weights `low`, set to their value wherever it does not round to it."""
    master: Tensor | None = state.get("master")
    if master is None:
        master = state["master"] = low.to(torch.float32).contiguous()
        return master
    changed = master.to(low.dtype) != low
    if changed.any():
        torch.where(changed, low.to(torch.float32), master, out=master)
    return master


def check_state(state: dict[str, Any], parameter: Tensor, block_size: int) -> None:
    """ValueError names what in the state does not fit `parameter` with blocks of `block_size`.

    The state holds `step`, the number of steps taken; the two averages, in float32 or as codes and scales; and, if
    there is one, the float32 `master` copy of the weights.
    """
    shape, blocks = list(parameter.shape), [-(-parameter.numel() // block_size)]
    owner = f"of a parameter of shape {shape}"
    step = state.get("step")
    if type(step) is not int or step < 0:
        found = repr(step) if "step" in state else "missing"
        raise UserError(f"optimizer state step {owner} is {found}; it must be a whole number, at least 0")
    expected = {"master": (shape, torch.float32)} if "master" in state else {}
    for name in ("mean", "square"):
        if "mean" in state:
            expected[name] = (shape, torch.float32)
        else:
            expected |= {f"{name}_codes": (shape, torch.uint8), f"{name}_scales": (blocks, torch.float32)}
    for name, (needed, dtype) in expected.items():
        value = state.get(name)
        if not (isinstance(value, Tensor) and list(value.shape) == needed and value.dtype == dtype):
            found = f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else "missing"
            raise UserError(
                f"optimizer state {name} {owner} is {found}; with blocks of {block_size} it must be {needed} of {dtype}"
            )


def is_sharded(tensor: object) -> "TypeIs[DTensor]":
    """Whether this process holds a shard of the tensor (FSDP2)."""
    return hasattr(tensor, "device_mesh")  # isinstance would need torch.distributed.tensor, a second of imports


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, in the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def all_reduce_sum(parameter: Tensor) -> Callable[[list[float]], list[float]]:
    """A function that sums numbers over the processes with a shard of the parameter; the identity if it is whole."""
    if not is_sharded(parameter):
        return list
    processes = parameter.device_mesh.get_group()

    def total(numbers: list[float]) -> list[float]:
        sums = torch.tensor(numbers, dtype=torch.float64, device=parameter.device)
        dist.all_reduce(sums, group=processes)
        return sums.tolist()

    return total
