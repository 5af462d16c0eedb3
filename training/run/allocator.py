"""How the C library handles the memory of tensors that were freed."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory() -> None:
    """Keep memory that tensors on the CPU have freed for the next ones, for the rest of the process.

    By default glibc returns tensors over 32 MB to the system when they are freed, and the system fills their pages with
    zeros again at the next step. Does nothing with another C library, or where the environment sets up this one's.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
