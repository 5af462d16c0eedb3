"""Loads the kernels of `kernels.py` and the modules that it imports, which need numba."""

import importlib
import os
import warnings
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

forked = False
if hasattr(os, "register_at_fork"):

    def note_fork() -> None:
        """GNU OpenMP ends a process that uses it after its parent has used it."""
        global forked
        forked = forked or kernels.cache_info().currsize > 0
        kernels.cache_clear()

    os.register_at_fork(after_in_child=note_fork)


@cache
def kernels(dtype: torch.dtype = torch.float32) -> ModuleType | None:
    """The kernels, compiled for float32, bfloat16 or int8; None without numba, in a process that was forked after its
    parent had used them, and with a warning if numba is installed but does not work."""
    if forked:
        return None
    threads = torch.get_num_threads()
    try:
        module = importlib.import_module("inference.sampling.kernels")
        module.prepare(array(torch.empty(0, dtype=dtype)).dtype)
    except ModuleNotFoundError:
        return None
    except Exception as error:  # numba raises many kinds, also for a full disk
        reason = str(error).partition("\n")[0]
        warnings.warn(f"numba cannot be used, drawing on the CPU will be slower: {reason}", stacklevel=2)
        return None
    finally:  # numba's OpenMP is torch's, and numba sets its number of threads to that of the cores
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    return module


def array(tensor: Tensor) -> Any:
    """The tensor's numbers as a NumPy array; bfloat16 as its bits, uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
