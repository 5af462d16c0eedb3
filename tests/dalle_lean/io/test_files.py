import json
import os
import tomllib

import pytest

from dalle_lean.errors import UserError
from dalle_lean.io.files import MAX_DEPTH, atomic_write, parse, read_json, write_json
from tests.dalle_lean.io.test_safetensors_io import little_time_and_memory


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})

    def write_until_the_power_goes():
        with atomic_write(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_until_the_power_goes()
    assert read_json(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def sparse(path, size_bytes):
    """A file of zeros that takes no room."""
    with open(path, "wb") as file:
        os.truncate(file.fileno(), size_bytes)


def test_a_file_that_says_it_is_huge_is_refused_before_it_is_read(tmp_path):
    sparse(tmp_path / "config.json", 2**36)
    words = r"config\.json has 68,719,476,736 bytes: it may have 16,777,216 at most"
    with little_time_and_memory(), pytest.raises(UserError, match=words):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_malformed_or_endlessly_nested_json_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json is not JSON: "):
        read_json(tmp_path / "config.json")


def test_nesting_that_can_be_read_but_not_worked_with_is_refused(tmp_path):
    for levels in (MAX_DEPTH - 1, MAX_DEPTH):
        (tmp_path / "config.json").write_text("[" * levels + "0" + "]" * levels)
        if levels < MAX_DEPTH:
            assert json.dumps(read_json(tmp_path / "config.json"))
        else:
            with pytest.raises(UserError, match="nested too deep"):
                read_json(tmp_path / "config.json")


def test_toml_nested_without_end_is_refused():
    with pytest.raises(UserError, match="it is not TOML: it is nested too deep"):
        parse(tomllib.loads, "a = " + "[" * 10_000 + "]" * 10_000, "it is not TOML")
