"""TrainingSetup: what a step's cost depends on besides the model and its MemoryPlan."""

from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZERS = ("lamb8bit", "lamb", "adamw", "adamw8bit")
DEVICES = ("cuda", "cpu")

Optimizer = Literal["lamb8bit", "lamb", "adamw", "adamw8bit"]


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One forward and backward of one batch, gradients added to existing ones, and the optimizer's state.

    Args:
        batch: samples at once (a micro-batch where gradients are accumulated).
        weight_dtype: of the weights and gradients.
        compute_dtype: of autocast; None computes in the weights' dtype.
        optimizer: "lamb8bit" (dalle_lean.optim.Lamb), "lamb" (the same with float32 statistics), "adamw" (torch's) or
            "adamw8bit" (bitsandbytes').
        device: "cuda", or "cpu": there the host is the device, and nothing can be offloaded.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    batch: int = 1
    weight_dtype: str = "float32"
    compute_dtype: str | None = None
    optimizer: str = "lamb8bit"
    device: str = "cuda"

    def __post_init__(self) -> None:
        if not isinstance(self.batch, int) or isinstance(self.batch, bool) or self.batch < 1:
            raise ValueError(f"batch={self.batch!r}: must be a whole number of at least 1")
        for name, allowed in (("optimizer", OPTIMIZERS), ("device", DEVICES), ("weight_dtype", tuple(DTYPE_BYTES))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if self.compute_dtype is not None and self.compute_dtype not in DTYPE_BYTES:
            raise ValueError(f"compute_dtype={self.compute_dtype!r}: must be one of {', '.join(DTYPE_BYTES)}, or None")

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight."""
        return DTYPE_BYTES[self.weight_dtype]

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that projections and attention compute with."""
        return DTYPE_BYTES[self.compute_dtype or self.weight_dtype]

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number in at least float32: of gradient buffers and what the loss computes with."""
        return max(4, self.weight_bytes)
