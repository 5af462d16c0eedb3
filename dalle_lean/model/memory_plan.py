"""MemoryPlan: settings that trade memory for time and change the result by rounding only."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from dalle_lean.errors import UserError
from dalle_lean.fields import PositiveInt, check
from dalle_lean.model.config import DalleConfig

if TYPE_CHECKING:  # the calculator must not wait for torch
    import torch

ACTIVATIONS = {True: ("keep", "reversible"), False: ("keep", "selective", "checkpoint")}
"""The choices of a config by whether it is reversible; the last is the leanest."""
SMALLEST_FUSED_HEAD = 16
RESIDUAL_DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a model computes its backward, and where its optimizer keeps its state; separate from DalleConfig and never
    saved with the weights.

    Args:
        activations: where backward gets a layer's activations. "keep": forward stores them. "selective": forward stores
            the outputs of dense projections, backward recomputes the rest. "checkpoint": forward stores the input of
            each branch. "reversible": forward stores nothing, backward rebuilds inputs from outputs. Reversible configs
            take keep and reversible, the others keep, selective and checkpoint. None is the leanest for the config.
        samples: samples of the batch in a branch at once.
        attention_heads: heads at once.
        feed_forward_tokens: tokens at once.
        loss_tokens: tokens whose logits exist at once.
        grads_in_place: backward itself adds gradients to each parameter's .grad (if float32 or wider), so that none
            exists twice while they accumulate. It needs `loss.backward()`: `torch.autograd.grad` and hooks on
            parameters see nothing.
        residual_dtype: of the residual streams: "float32", "bfloat16" or "float64"; None is at least float32.
            Reversible backward refuses bfloat16: inputs rebuilt from it drift by more than rounding.
        fused_attention: on a GPU, row, column and convolution attention of 16-bit heads of at least 16 channels are
            computed by torch's FlexAttention, which keeps no scores and is compiled at the first use of each shape.
        offload_optimizer: the optimizer's statistics are on the CPU.
        master_weights: low-precision weights have float32 copies on the CPU, which the optimizer updates.

    A size of None is the whole. samples, attention_heads and feed_forward_tokens apply where branches are recomputed
    (checkpoint, reversible) and where no gradient is needed; other plans run each branch as a whole.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    activations: Annotated[str, tuple(dict.fromkeys((*ACTIVATIONS[False], *ACTIVATIONS[True])))] | None = None
    samples: PositiveInt | None = None
    attention_heads: PositiveInt | None = None
    feed_forward_tokens: PositiveInt | None = None
    loss_tokens: PositiveInt | None = 256
    grads_in_place: bool = False
    residual_dtype: Annotated[str, RESIDUAL_DTYPES] | None = None
    fused_attention: bool = False
    offload_optimizer: bool = True
    master_weights: bool = False

    for_budget: ClassVar[Callable[..., "MemoryPlan"]]
    """The fastest plan that fits: set by `dalle_lean.memory.plan_search`, which imports this module."""

    def __post_init__(self) -> None:
        check(self)

    def activations_for(self, config: DalleConfig) -> str:
        """The choice for this config; ValueError if the config does not support the plan."""
        allowed = ACTIVATIONS[config.reversible]
        activations = allowed[-1] if self.activations is None else self.activations
        if activations == "reversible" and self.residual_dtype == "bfloat16":
            raise UserError("residual_dtype='bfloat16': activations='reversible' needs float32 or float64")
        if activations not in allowed:
            kind = "a reversible model" if config.reversible else "a model that is not reversible"
            raise UserError(f"activations={self.activations!r}: {kind} takes {', '.join(allowed)}")
        return activations

    def fuses_attention(self, config: DalleConfig, device: str, compute_bytes: int) -> bool:
        """Whether FlexAttention computes the sparse kinds on such a device, in numbers of `compute_bytes`."""
        large_enough = config.head_size >= SMALLEST_FUSED_HEAD
        return self.fused_attention and large_enough and device == "cuda" and compute_bytes == 2

    def recomputes(self, config: DalleConfig) -> bool:
        """Whether backward recomputes branches, in chunks."""
        return self.activations_for(config) in ("checkpoint", "reversible")

    def residual_dtype_for(self, weights: "torch.dtype") -> "torch.dtype":
        """The residual streams' dtype in a model with weights of this dtype."""
        import torch

        if self.residual_dtype is None:
            return torch.promote_types(weights, torch.float32)
        return getattr(torch, self.residual_dtype)


def ranges(count: int, size: int | None) -> Iterator[slice]:
    """0..count in slices of at most `size`; None is one slice."""
    for start in range(0, count, size or count):
        yield slice(start, min(start + (size or count), count))
