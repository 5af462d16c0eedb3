"""User errors as opposed to bugs, out-of-memory errors, and common checks of a value."""

import math
from typing import TypeGuard

OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
HIGHEST_GUIDANCE = 1e3
DEFAULT_GUIDANCE_RANGE = 1, 8
"""Lowest and highest guidance that the prompt page offers, and that `pack` takes for a model's default."""


class UserError(ValueError):
    """The user can fix it: the message says what is wrong, with which value, and what to do."""


def is_whole(value: object, largest: float = math.inf) -> TypeGuard[int]:
    """Whether a value is a whole number in 0..largest; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest


def check_guidance(guidance: float) -> None:
    """ValueError unless the scale of classifier-free guidance is in 0..HIGHEST_GUIDANCE."""
    if not 0 <= guidance <= HIGHEST_GUIDANCE:
        raise UserError(f"guidance={guidance}: it must lie in 0..{HIGHEST_GUIDANCE:g} (1 is off)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: a MemoryError, torch's OutOfMemoryError, or its bare RuntimeError for the CPU."""
    # OutOfMemoryError by name, so that the command line does not import torch.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(words in str(error) for words in OUT_OF_MEMORY)
    )
