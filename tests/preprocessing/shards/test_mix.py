"""Several folders of shards become one that verify, the reader and training take."""

import os

import numpy as np
import pytest

from dalle_lean.errors import UserError
from preprocessing.shards.manifest import read_dataset_info
from preprocessing.shards.mix import mix
from preprocessing.shards.verify import find_faults
from tests.preprocessing.runs import run_command
from tests.preprocessing.shard_folders import make_rows, random_codes, stored_rows, write_folder
from tests.tiny import tiny_vqgan


@pytest.fixture
def few(tmp_path, vqgan):
    return write_folder(tmp_path / "few", vqgan, [make_rows(random_codes(vqgan, 5), 1)], rejected={"small": 2})


@pytest.fixture
def many(tmp_path, vqgan):
    parts = [make_rows(random_codes(vqgan, 40, seed), seed) for seed in (2, 3)]
    return write_folder(tmp_path / "many", vqgan, parts)


def test_each_folder_is_there_as_often_as_asked_and_the_sources_stay(few, many, vqgan, tmp_path, capsys):
    assert run_command("shards", "mix", tmp_path / "mixed", f"{few}:3", many) == 0
    assert "5 shards, 95 pictures" in capsys.readouterr().out
    info = read_dataset_info(tmp_path / "mixed")
    assert (info.counts.seen, info.counts.kept, info.counts.rejected) == (3 * 7 + 80, 95, {"small": 6})
    assert find_faults(tmp_path / "mixed", vqgan=vqgan) == []
    mixed = np.stack([row["codes"] for row in stored_rows(tmp_path / "mixed")])
    parts = [np.stack([row["codes"] for row in stored_rows(folder)]) for folder in (few, few, few, many)]
    assert (mixed == np.concatenate(parts)).all()
    assert find_faults(few) == find_faults(many) == []


def test_shards_are_linked_where_the_file_system_has_links(few, many, tmp_path):
    info = mix([(few, 2), (many, 1)], tmp_path / "mixed")
    assert (tmp_path / "mixed").stat().st_mode & 0o777 == 0o755  # others can read them
    assert {os.stat(tmp_path / "mixed" / shard.file).st_nlink for shard in info.shards} == {2, 3}


def test_codes_of_another_vqgan_are_refused(few, tmp_path):
    other = tiny_vqgan(codebook_size=64, picture_side=16, seed=1)
    strange = write_folder(tmp_path / "strange", other, [make_rows(random_codes(other, 4))])
    with pytest.raises(UserError, match=f"{strange} has codes of the VQGAN {other.fingerprint()[:12]}, 2 x 2 a pict"):
        mix([(few, 1), (strange, 1)], tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_a_folder_named_twice_is_recorded_with_both_numbers(few, many, tmp_path):
    info = mix([(few, 2), (many, 1), (few, 3)], tmp_path / "mixed")
    assert info.settings == {"mixed": {str(few): 5, str(many): 1}}


def test_more_shards_than_a_folder_can_list_are_refused_before_any_is_linked(few, many, tmp_path, monkeypatch):
    monkeypatch.setattr("preprocessing.shards.mix.link_or_copy", lambda *paths: pytest.fail("a shard was linked"))
    with pytest.raises(UserError, match=r"dataset.json has room for the first 39\d,\d{3} of these shards only"):
        mix([(few, 10**9), (many, 1)], tmp_path / "mixed")


def test_a_folder_that_exists_is_left_alone(few, many):
    with pytest.raises(UserError, match="exists already"):
        mix([(few, 1)], many)


def test_no_times_are_refused(few, tmp_path):
    with pytest.raises(UserError, match="few:0: must count at least once"):
        mix([(few, 0)], tmp_path / "mixed")
