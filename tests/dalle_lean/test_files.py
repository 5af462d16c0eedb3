import pytest

from dalle_lean.files import atomic_write, read_json, write_json


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


def test_malformed_json_is_refused_by_name(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is not JSON"):
        read_json(tmp_path / "broken.json")
