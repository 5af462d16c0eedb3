"""Functions compiled by numba."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(**settings: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile at the first call, with numba's `settings`, to run without the GIL; cached on disk if possible.

    Not with `fastmath`: the process that compiles would compute other bits than those that load the cached code.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(function, cache=True, nogil=True, error_model="numpy", **settings)
        except RuntimeError:  # neither __pycache__ nor the user's cache folder can be written
            return njit(function, nogil=True, error_model="numpy", **settings)

    return decorate
