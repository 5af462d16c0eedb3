import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")
from dalle_lean.compiled import compiled


def test_where_no_cache_can_be_written_it_is_compiled_all_the_same():
    without_file: dict = {}
    exec("def double(x):\n    return 2 * x", without_file)
    assert compiled()(without_file["double"])(3) == 6


CALLER = """
from dalle_lean.compiled import compiled
from called_kernel import called

@compiled()
def caller(x):
    return called(x) + 1

if __name__ == "__main__":
    import caller_kernel
    print(caller_kernel.caller(1), sum(caller_kernel.caller.stats.cache_hits.values()))
"""


def test_a_kernel_is_compiled_again_when_one_of_another_file_that_it_calls_has_changed(tmp_path):
    (tmp_path / "caller_kernel.py").write_text(CALLER)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def result_and_cache_hits(factor):
        code = f"from dalle_lean.compiled import compiled\n\n@compiled()\ndef called(x):\n    return {factor} * x\n"
        called = tmp_path / "called_kernel.py"
        if not called.exists() or called.read_text() != code:
            called.write_text(code)
        command = [sys.executable, str(tmp_path / "caller_kernel.py")]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()

    assert result_and_cache_hits(10) == ["11", "0"]
    assert result_and_cache_hits(10) == ["11", "1"]
    assert result_and_cache_hits(200) == ["201", "0"]
