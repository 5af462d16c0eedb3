"""TrainingSetup: what a step's cost depends on besides the model and its MemoryPlan."""

from dataclasses import dataclass
from typing import Annotated, Any, Self

from dalle_lean.errors import UserError
from dalle_lean.fields import PositiveInt, check

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
OPTIMIZERS = ("lamb", "adamw", "adamw8bit", "muon")
"""By their names in recipes."""
STATISTICS = ("lamb8bit", *OPTIMIZERS)
"""Optimizers by the statistics that they keep: "lamb8bit" is LAMB with 8-bit ones."""
DEVICES = ("cuda", "cpu")
PRECISIONS = {
    "fp32": ("float32", None),
    "bf16": ("float32", "bfloat16"),
    "fp16": ("float32", "float16"),
    "bf16-weights": ("bfloat16", None),
}
"""Name in recipes -> dtypes of (weights, autocast)."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """One forward and backward of one batch, gradients added to existing ones, and the optimizer's state.

    Args:
        batch: samples at once (a micro-batch where gradients are accumulated).
        weight_dtype: of the weights and gradients.
        compute_dtype: of autocast; None computes in the weights' dtype.
        optimizer: "lamb8bit" (dalle_lean.optim.lamb.Lamb), "lamb" (the same with float32 statistics), "adamw"
            (torch's), "adamw8bit" (bitsandbytes') or "muon" (dalle_lean.optim.muon).
        block_size, min_eight_bit_numel: of "lamb8bit": elements with one scale; smaller tensors stay float32.
        device: "cuda" or "cpu"; with "cpu" the host is the device, and nothing can be offloaded.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    batch: PositiveInt = 1
    weight_dtype: Annotated[str, tuple(DTYPE_BYTES)] = "float32"
    compute_dtype: Annotated[str, tuple(DTYPE_BYTES)] | None = None
    optimizer: Annotated[str, STATISTICS] = "lamb8bit"
    block_size: int = 4096
    min_eight_bit_numel: int = 65536
    device: Annotated[str, DEVICES] = "cuda"

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def of_precision(cls, precision: str, **fields: Any) -> Self:
        """A setup with the dtypes of one of `PRECISIONS`."""
        if precision not in PRECISIONS:
            raise UserError(f"precision={precision!r}: must be one of {', '.join(PRECISIONS)}")
        weight_dtype, compute_dtype = PRECISIONS[precision]
        return cls(weight_dtype=weight_dtype, compute_dtype=compute_dtype, **fields)

    @property
    def is_lamb(self) -> bool:
        """Whether the optimizer is this package's LAMB, the only one that can be offloaded."""
        return self.optimizer.startswith("lamb")

    @property
    def weight_bytes(self) -> int:
        return DTYPE_BYTES[self.weight_dtype]

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in projections and attention."""
        return DTYPE_BYTES[self.compute_dtype or self.weight_dtype]
