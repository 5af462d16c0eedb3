"""The user's mistakes as opposed to bugs, a lack of memory, and the most common check for them."""

import math
from typing import TypeGuard

OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class UserError(ValueError):
    """The user can mend it: the message says what is wrong, with which value, and what to do."""


def is_whole(value: object, smallest: int = 1, largest: float = math.inf) -> TypeGuard[int]:
    """Whether a value from a user or a file is a whole number in smallest..largest; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, torch's on a GPU, or torch's on the CPU, which is a bare RuntimeError."""
    # By its name: the command line does not wait for torch.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(words in str(error) for words in OUT_OF_MEMORY)
    )
