import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from preprocessing.shards import files
from tests.preprocessing.shard_folders import read_rows, stored_rows
from tests.training.conftest import windows_of_a_pass, write_shards
from training.data.catalog import find_shards
from training.data.heldout import heldout_rows, is_heldout
from training.data.loader import TrainingData
from training.run.recipe import DataRecipe


def places(rows):
    return sorted(int(key.removeprefix("picture-")) for key in rows.keys)


def test_what_is_held_out_is_never_trained_on(shards):
    data = TrainingData(find_shards(shards), DataRecipe(heldout_share=0.1, shuffle_buffer=16, seed=3))
    heldout = heldout_rows(data.shards, 0.1, 1000).keys
    assert 0 < len(heldout) < 40
    trained = [key for rows, position in windows_of_a_pass(data) for key in rows.keys]
    assert not set(heldout) & set(trained)
    assert len(heldout) + len(list(data.captions())) == 120


def test_all_views_of_a_picture_are_held_out_or_none(tmp_path):
    folder = write_shards(tmp_path / "views", 120)
    for path in folder.glob("*.parquet"):
        table = pq.read_table(path)
        views = [view_of(int(key.removeprefix("picture-"))) for key in table["key"].to_pylist()]
        pq.write_table(table.set_column(table.column_names.index("key"), "key", pa.array(views)), path)
    data = TrainingData(find_shards(folder), DataRecipe(heldout_share=0.2, shuffle_buffer=16, seed=3))
    heldout = heldout_rows(data.shards, 0.2, 1000).keys
    trained = [key for rows, _ in windows_of_a_pass(data) for key in rows.keys]
    assert sorted([*heldout, *trained]) == sorted(map(view_of, range(120)))
    assert {key.split("#")[0] for key in heldout}.isdisjoint(key.split("#")[0] for key in trained)
    assert any("#" in key for key in heldout)


def view_of(row):
    """Three views of each picture, as preprocessing names them."""
    picture, view = divmod(row, 3)
    return f"picture-{picture}#{view}" if view else f"picture-{picture}"


def test_held_out_rows_have_the_captions_and_codes_of_their_keys(shards):
    stored = {row["key"]: row for row in stored_rows(shards)}
    rows = heldout_rows(find_shards(shards), 0.5, 30)
    assert rows.captions == [stored[key]["caption"] for key in rows.keys]
    assert rows.codes.tolist() == [list(stored[key]["codes"]) for key in rows.keys]


def test_shards_of_their_own_can_be_held_out(shards):
    assert len(heldout_rows(find_shards(shards), 1.0, 50)) == 50


@pytest.mark.parametrize(("share", "count"), [(0.0, 10), (0.5, 0)])
def test_nothing_is_held_out_where_nothing_is_wanted(shards, share, count):
    assert len(heldout_rows(find_shards(shards), share, count)) == 0


def test_held_out_rows_are_a_fair_sample_that_does_not_depend_on_their_order(tmp_path):
    sorted_shards = write_shards(tmp_path / "sorted", 600)
    chosen = places(heldout_rows(find_shards(sorted_shards), 1.0, 150))
    quarters = [sum(start <= place < start + 150 for place in chosen) for start in range(0, 600, 150)]
    assert all(25 <= quarter <= 50 for quarter in quarters)
    assert len(set(chosen)) == 150

    info = json.loads((sorted_shards / "dataset.json").read_text())
    info["shards"].reverse()
    (sorted_shards / "dataset.json").write_text(json.dumps(info))
    assert places(heldout_rows(find_shards(sorted_shards), 1.0, 150)) == chosen


def test_of_many_shards_only_as_many_are_read_as_it_takes(tmp_path, monkeypatch):
    shards = find_shards(write_shards(tmp_path / "many", 1000, shard_rows=10))
    opened = []
    real = type(shards).open
    monkeypatch.setattr(type(shards), "open", lambda self, index: opened.append(index) or real(self, index))
    assert len(heldout_rows(shards, 0.2, 40)) == 40
    assert 30 <= len(set(opened)) <= 55


def test_only_codes_that_are_picked_are_decoded(tmp_path, monkeypatch):
    folder = write_shards(tmp_path / "large", 1200, shard_rows=600)
    stored = {row["key"]: row for row in read_rows([str(path) for path in sorted(folder.glob("*.parquet"))], 16, 32)}
    decoded = []
    real = files.decode_codes
    monkeypatch.setattr(files, "decode_codes", lambda values, *sizes: decoded.extend(values) or real(values, *sizes))
    rows = heldout_rows(find_shards(folder), 0.1, 8)
    assert rows.codes.tolist() == [stored[key]["codes"].tolist() for key in rows.keys]
    assert len(rows) == len(decoded) == 8


def test_few_rows_come_from_few_shards(tmp_path, monkeypatch):
    shards = find_shards(write_shards(tmp_path / "many", 1000, shard_rows=50))
    opened = []
    real = type(shards).open
    monkeypatch.setattr(type(shards), "open", lambda self, index: opened.append(index) or real(self, index))
    assert len(heldout_rows(shards, 1.0, 64, fewest_shards=4)) == 64
    assert len(set(opened)) == 4


def test_rows_before_damage_in_the_middle_of_a_shard_are_picked(tmp_path):
    folder, noticed = write_shards(tmp_path / "data", 60, shard_rows=60), []
    table = pq.read_table(folder / "shard-00000.parquet")
    codes = [*table["code"].to_pylist()[:30], *[b"short"] * 30]
    table = table.set_column(table.column_names.index("code"), "code", pa.array(codes, pa.binary()))
    pq.write_table(table, folder / "shard-00000.parquet", row_group_size=10)
    assert places(heldout_rows(find_shards(folder, on_notice=noticed.append), 1.0, 60)) == list(range(30))
    assert "shard-00000.parquet is damaged" in noticed[0]


def test_rows_of_shards_without_keys_are_told_apart_by_their_numbers(tmp_path):
    folder = write_shards(tmp_path / "data", 60, shard_rows=30)
    for path in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop_columns("key"), path, row_group_size=10)
    assert sorted(map(int, heldout_rows(find_shards(folder), 1.0, 60).keys)) == sorted([*range(30), *range(30)])


def test_a_damaged_shard_is_named_and_the_others_are_held_out_from(tmp_path):
    folder, noticed = write_shards(tmp_path / "data"), []
    (folder / "shard-00001.parquet").write_bytes(b"PAR1")
    chosen = places(heldout_rows(find_shards(folder, on_notice=noticed.append), 1.0, 200))
    assert chosen == [place for place in range(120) if place // 32 != 1]
    assert "shard-00001.parquet is damaged" in noticed[0]


def test_the_hash_holds_out_the_share_asked_for():
    share = sum(is_heldout(f"key-{index}", 0.2) for index in range(5000)) / 5000
    assert 0.18 < share < 0.22
    assert not is_heldout("any", 0.0)
