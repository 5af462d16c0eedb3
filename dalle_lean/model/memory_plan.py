"""MemoryPlan: what trades memory for time and never changes the result beyond rounding."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dalle_lean.errors import UserError, is_whole
from dalle_lean.model.config import DalleConfig

if TYPE_CHECKING:  # the calculator must not wait for torch
    import torch

ACTIVATIONS = {True: ("keep", "reversible"), False: ("keep", "selective", "checkpoint")}
"""What a config can have, by whether it is reversible; the last is the leanest."""
CHUNKS = ("samples", "attention_heads", "feed_forward_tokens", "loss_tokens")
RESIDUAL_DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """How a model computes its backward; apart from DalleConfig and never saved with the weights.

    Args:
        activations: where backward gets a layer's activations. "keep": stored in forward. "selective": outputs of
            dense projections are stored, the rest is computed again. "checkpoint": the input of each branch is stored.
            "reversible": nothing is stored, inputs are rebuilt from outputs. Reversible configs take keep and
            reversible, the others keep, selective and checkpoint. None: the leanest that the config allows.
        samples: how many of the batch go through a branch at once.
        attention_heads: heads at once.
        feed_forward_tokens: tokens at once.
        loss_tokens: tokens whose logits exist at once.
        grads_in_place: backward adds gradients to the .grad of each parameter (in float32 or wider) itself, so that
            none exists twice while they are accumulated. Call `loss.backward()` then: `torch.autograd.grad` and hooks
            on parameters see nothing.
        residual_dtype: of the residual streams: "float32", "bfloat16" or "float64"; None is at least float32. Rebuilt
            from bfloat16 streams, inputs drift by more than rounding: reversible backward refuses them.
        offload_optimizer: the optimizer's statistics are on the CPU.
        master_weights: low-precision weights have float32 copies on the CPU, which the optimizer updates.

    None leaves a size whole. samples, attention_heads and feed_forward_tokens hold where branches are computed again
    (checkpoint, reversible) and where no gradient is wanted; other plans run each branch as a whole.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    activations: str | None = None
    samples: int | None = None
    attention_heads: int | None = None
    feed_forward_tokens: int | None = None
    loss_tokens: int | None = 256
    grads_in_place: bool = False
    residual_dtype: str | None = None
    offload_optimizer: bool = True
    master_weights: bool = False

    for_budget: ClassVar[Callable[..., "MemoryPlan"]]
    """The fastest plan that fits: set by `dalle_lean.memory.plan_search`, which imports this module."""

    def __post_init__(self) -> None:
        known = tuple(dict.fromkeys((*ACTIVATIONS[False], *ACTIVATIONS[True])))
        if self.activations is not None and self.activations not in known:
            raise UserError(f"activations={self.activations!r}: must be one of {', '.join(known)}")
        for name in CHUNKS:
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                raise UserError(f"{name}={value!r}: must be a whole number of at least 1, or None for all at once")
        if self.residual_dtype is not None and self.residual_dtype not in RESIDUAL_DTYPES:
            raise UserError(f"residual_dtype={self.residual_dtype!r}: must be one of {', '.join(RESIDUAL_DTYPES)}")
        for name in ("grads_in_place", "offload_optimizer", "master_weights"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r}: must be true or false")

    def activations_for(self, config: DalleConfig) -> str:
        """The choice for this config; ValueError where the config cannot have it."""
        allowed = ACTIVATIONS[config.reversible]
        activations = allowed[-1] if self.activations is None else self.activations
        if activations == "reversible" and self.residual_dtype == "bfloat16":
            raise UserError("residual_dtype='bfloat16': activations='reversible' needs float32 or float64")
        if activations not in allowed:
            raise UserError(
                f"activations={self.activations!r}: a config with reversible={config.reversible} takes "
                f"{', '.join(allowed)}"
            )
        return activations

    def residual_dtype_for(self, weights: "torch.dtype") -> "torch.dtype":
        """The residual streams' dtype of a model with weights of this dtype."""
        import torch

        if self.residual_dtype is None:
            return torch.promote_types(weights, torch.float32)
        return getattr(torch, self.residual_dtype)  # type: ignore[no-any-return]


def ranges(count: int, size: int | None) -> Iterator[slice]:
    """0..count in slices of `size`; None is all at once."""
    for start in range(0, count, size or count):
        yield slice(start, min(start + (size or count), count))
