import pytest

pytest.importorskip("numba")
from dalle_lean.compiled import compiled


def test_where_no_cache_can_be_written_it_is_compiled_all_the_same():
    without_file: dict = {}
    exec("def double(x):\n    return 2 * x", without_file)
    assert compiled()(without_file["double"])(3) == 6
