"""The user's mistakes as opposed to bugs, and the most common check for them."""

import math
from typing import TypeGuard


class UserError(ValueError):
    """The user can mend it: the message says what is wrong, with which value, and what to do."""


def is_whole(value: object, smallest: int = 1, largest: float = math.inf) -> TypeGuard[int]:
    """Whether a value from a user or a file is a whole number in smallest..largest; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest
