"""make uses the environment that is active, and makes one only where none is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("variables", "environment"),
    [
        ({}, ".venv"),
        ({"VIRTUAL_ENV": "/somewhere/mine"}, "/somewhere/mine"),
        ({"CONDA_DEFAULT_ENV": "dalle-lean", "CONDA_PREFIX": "/conda/envs/dalle-lean"}, "/conda/envs/dalle-lean"),
        ({"CONDA_DEFAULT_ENV": "base", "CONDA_PREFIX": "/conda"}, ".venv"),
    ],
)
def test_targets_run_in_the_active_environment(tmp_path, variables, environment):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "CONDA_", "MAKE"))
    }
    command = ["make", "--dry-run", "lint"]
    result = subprocess.run(command, cwd=tmp_path, env=clean | variables, capture_output=True, text=True, check=True)
    assert f"\n{environment}/bin/ruff check ." in result.stdout
    assert f"test -e {environment}/bin/python || python3 -m venv {environment}\n" in result.stdout
    assert f"touch {environment}/installed" in result.stdout
    assert environment == ".venv" or ".venv" not in result.stdout
