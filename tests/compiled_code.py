"""Runs a program that compiles with numba, and runs it again with what that left on the disk."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def outputs_compiled_and_cached(program, folder):
    """What the program prints when it compiles, and when it loads the compiled code from `folder`."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", program]
    printed = [
        subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True).stdout for _ in range(2)
    ]
    assert any(folder.rglob("*.nbc")), "nothing was compiled"
    return printed
