import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from training.run.allocator import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**24)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(new_pages())
keep_freed_memory()
new_pages()
print(new_pages())
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="another C library")
@pytest.mark.parametrize(
    ("setting", "kept"),
    [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False), ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False)],
)
def test_training_gets_the_memory_it_has_freed_again_unless_the_user_says_otherwise(setting, kept):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | setting
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    before, after = map(int, result.stdout.split())
    assert before >= 256  # 8 times 64 MB in huge pages of 2 MB
    assert after < before / 4 if kept else after > before / 2
