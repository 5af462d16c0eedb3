"""Functions compiled by numba."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit


def compiled(**settings: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile at the first call, with numba's `settings`, to run without the GIL; cached on disk if possible.

    Not with `fastmath`: the process that compiles would compute other bits than those that load the cached code.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        kernel: Any = njit(function, nogil=True, error_model="numpy", **settings)
        try:
            kernel.enable_caching()
        except RuntimeError:  # neither __pycache__ nor the user's cache folder can be written
            return kernel
        index = kernel._cache._cache_file
        index._source_stamp = *index._source_stamp, *kernel_stamps(Path(function.__code__.co_filename).parent)
        return kernel

    return decorate


def kernel_stamps(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of each file of kernels in a folder. numba looks at a function's own file only, but compiles
    what it calls into it."""
    found = ((path.name, path.stat()) for path in sorted(folder.glob("*_kernel.py")))
    return [(name, file.st_size, file.st_mtime_ns) for name, file in found]
