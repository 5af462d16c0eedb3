from dataclasses import replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dalle_lean.tokenizer import Tokenizer
from tests.preprocessing.shard_folders import stored_rows
from tests.training.conftest import windows_of_a_pass, write_shards
from training.data.catalog import find_shards
from training.data.heldout import is_heldout
from training.data.loader import TrainingData, collate
from training.data.sampler import Position
from training.run.recipe import DataRecipe


@pytest.fixture
def data(shards):
    return training_data(shards)


def training_data(folder, **settings):
    defaults = {"heldout_share": 0.1, "shuffle_buffer": 16, "shuffle_shards": 3, "seed": 3}
    return TrainingData(find_shards(folder), DataRecipe(**{**defaults, **settings}))


def changed(data, **settings):
    return replace(data, recipe=replace(data.recipe, **settings))


def stored_keys(folder):
    return [row["key"] for row in stored_rows(folder) if not is_heldout(row["key"], 0.1)]


def keys(data, epoch=0):
    """The keys of one pass, in its order."""
    return [key for rows, _ in windows_of_a_pass(data, Position(epoch=epoch)) for key in rows.keys]


def test_a_pass_has_every_training_row_once_in_another_order_than_the_shards(data, shards):
    order = keys(data)
    assert sorted(order) == sorted(stored_keys(shards))
    assert order != stored_keys(shards)


@pytest.mark.parametrize(("shuffle_buffer", "shuffle_shards"), [(1, 1), (5, 2), (7, 4), (1000, 4), (40, 100)])
def test_every_buffer_and_number_of_shards_gives_every_row_once(shards, shuffle_buffer, shuffle_shards):
    data = training_data(shards, shuffle_buffer=shuffle_buffer, shuffle_shards=shuffle_shards)
    for epoch in range(3):
        assert sorted(keys(data, epoch)) == sorted(stored_keys(shards))


def test_the_order_follows_from_the_seed_the_pass_and_the_peer(data):
    assert keys(data) == keys(replace(data))
    peers = [replace(data, identity=identity) for identity in ("", "alice", "bob")]
    orders = [keys(peer, epoch) for peer in (*peers, changed(data, seed=4)) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_the_order_is_the_one_that_earlier_versions_made(data):
    assert keys(data)[:6] == [f"picture-{number}" for number in (0, 4, 96, 35, 1, 97)]


def test_rows_of_a_batch_come_from_many_shards_and_other_rows_meet_in_the_next_pass(tmp_path):
    data = training_data(write_shards(tmp_path / "many", 1200, shard_rows=100), shuffle_buffer=60, shuffle_shards=6)
    windows = [[], []]
    for rows, position in data.windows():
        if position.epoch == 2:
            break
        windows[position.epoch].append(rows.keys)
    full = [window for window in windows[0] if len(window) > 45]
    assert len(full) > 10
    assert all(len({int(key.removeprefix("picture-")) // 100 for key in window}) == 6 for window in full)
    sets = [{frozenset(window) for window in part if window} for part in windows]
    assert not sets[0] & sets[1]


def test_what_fits_into_the_buffer_is_shuffled_whole(data, shards):
    rows, _ = next(changed(data, shuffle_buffer=128, shuffle_shards=4).windows())
    assert sorted(rows.keys) == sorted(stored_keys(shards))


def test_from_any_position_on_the_batches_are_those_of_an_uninterrupted_reader(data, tokenizer):
    whole = list(islice(data.batches(25, tokenizer, 6), 9))  # two passes
    assert whole[-1][1].epoch == 2
    for number, (_, position) in enumerate(whole[:-1], start=1):
        batch, _ = next(data.batches(25, tokenizer, 6, Position.from_dict(position.to_dict())))
        assert same(batch, whole[number][0])


def same(batch, other):
    return all(torch.equal(part, of_other) for part, of_other in zip(batch, other, strict=True))


@pytest.mark.parametrize("kills", [(1, 3), (4, 4), (2, 5, 9, 10)])
def test_kills_one_after_the_other_change_nothing_of_what_comes(data, tokenizer, kills):
    whole = [batch for batch, _ in islice(data.batches(13, tokenizer, 6), 24)]
    found, position = [], Position()
    for stop in (*kills, 24):
        for batch, place in islice(data.batches(13, tokenizer, 6, position), stop - len(found)):
            found.append(batch)
            position = place
    assert all(same(*pair) for pair in zip(found, whole, strict=True))


def test_to_go_on_no_shard_of_an_earlier_group_is_opened(tmp_path, monkeypatch, tokenizer):
    data = training_data(write_shards(tmp_path / "many", 400, shard_rows=10), shuffle_shards=2)
    (*_, (_, position)) = islice(data.batches(10, tokenizer, 6), 30)
    opened = []
    real = type(data.shards).open
    monkeypatch.setattr(type(data.shards), "open", lambda self, index: opened.append(index) or real(self, index))
    next(data.batches(5, tokenizer, 6, position))
    assert 1 <= len(opened) <= 8


def test_a_batch_has_the_captions_and_codes_of_its_rows(data, shards, tokenizer):
    stored = {row["key"]: row for row in stored_rows(shards)}
    rows, _ = next(data.windows())
    batch = collate(rows, tokenizer, 6)
    assert batch.text_ids.dtype == batch.image_codes.dtype == torch.int64
    assert batch.image_codes.tolist() == [list(stored[key]["codes"]) for key in rows.keys]
    assert torch.equal(batch.text_ids, tokenizer.encode([stored[key]["caption"] for key in rows.keys], 6))


def test_batches_made_ahead_are_the_same(data, tokenizer):
    ahead = list(data.ahead(islice(data.batches(20, tokenizer, 6), 12)))
    assert len(ahead) == 12
    expected = islice(data.batches(20, tokenizer, 6), 12)
    for (batch, position), (other, place) in zip(ahead, expected, strict=True):
        assert same(batch, other)
        assert position == place


@pytest.mark.gpu
def test_batches_for_a_gpu_are_pinned(data, tokenizer):
    batch, _ = next(data.ahead(data.batches(20, tokenizer, 6), pin=True))
    assert all(part.is_pinned() for part in batch)
    assert same([part.cuda(non_blocking=True).cpu() for part in batch], next(data.batches(20, tokenizer, 6))[0])


def trained_on(numbers):
    """The keys of rows that are not held out."""
    return [key for key in (f"picture-{number}" for number in numbers) if not is_heldout(key, 0.1)]


def damage(folder, name, keep):
    """Cut a shard after a share of its bytes."""
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: int(len(content) * keep)])


@pytest.fixture
def spoilt(tmp_path, noticed):
    """Ten shards, two of them damaged; the reader's notices go to `noticed`."""
    folder = write_shards(tmp_path / "spoilt", 400, shard_rows=40)
    damage(folder, "shard-00003.parquet", 0.7)
    damage(folder, "shard-00006.parquet", 0)
    return replace(training_data(folder), shards=find_shards(folder, on_notice=noticed.append))


def test_a_damaged_shard_is_named_passed_over_and_counted_and_the_others_are_whole(spoilt, noticed):
    found = keys(spoilt)
    assert sorted(found) == sorted(trained_on(number for number in range(400) if number // 40 not in (3, 6)))
    assert len(set(noticed)) == 2
    assert any("shard-00003.parquet is damaged" in line and "skipped" in line for line in noticed)
    positions = (position for _, position in spoilt.windows())
    assert next(position.skipped for position in positions if position.epoch == 2) == 4


def test_a_shard_with_other_rows_than_its_data_set_says_is_damaged(tmp_path, noticed):
    folder = write_shards(tmp_path / "data")
    (folder / "shard-00003.parquet").write_bytes((folder / "shard-00000.parquet").read_bytes())
    data = replace(training_data(folder), shards=find_shards(folder, on_notice=noticed.append))
    assert sorted(keys(data)) == sorted(trained_on(range(96)))
    assert "it has 32 rows, its data set says 24" in noticed[0]


def spoil_rows_from(folder, name, row):
    """Codes out of range from this row of a shard on: found only when they are read."""
    table = pq.read_table(folder / name)
    codes = table["code"].to_pylist()
    codes[row:] = [np.full(16, 999, "<i2").tobytes()] * (len(codes) - row)
    table = table.set_column(table.column_names.index("code"), "code", pa.array(codes, pa.binary()))
    pq.write_table(table, folder / name, compression="brotli", row_group_size=10)


def test_damage_in_the_middle_of_a_shard_is_found_once_and_resumed_behind_exactly(tmp_path, tokenizer, noticed):
    folder = write_shards(tmp_path / "data", 400, shard_rows=40)
    for name in ("shard-00002.parquet", "shard-00007.parquet"):
        spoil_rows_from(folder, name, 21)
    data = replace(training_data(folder), shards=find_shards(folder, on_notice=noticed.append))
    whole = list(islice(data.batches(11, tokenizer, 6), 40))
    assert whole[-1][1].skipped >= 2
    assert all(0 <= int(line.split("row ")[1].split(" on")[0]) <= 21 for line in noticed)
    for number, (_, position) in enumerate(whole[:-1], start=1):
        batch, place = next(data.batches(11, tokenizer, 6, position))
        assert same(batch, whole[number][0])
        assert place == whole[number][1]


def spoil_bytes_of_group(folder, name, group):
    """Rows in groups of 30, and bytes flipped in the codes of one."""
    pq.write_table(
        pq.read_table(folder / name), folder / name, compression="brotli", row_group_size=30, use_dictionary=False
    )
    metadata = pq.read_metadata(folder / name)
    column = metadata.row_group(group).column(metadata.schema.names.index("code"))
    content = np.fromfile(folder / name, np.uint8)
    middle = column.data_page_offset + column.total_compressed_size // 2
    content[middle : middle + 60] ^= 0xFF
    content.tofile(folder / name)


@pytest.mark.parametrize(("buffer", "side"), [(28, 4), (16, 3), (100, 2)])
def test_damaged_bytes_in_the_middle_of_a_shard_are_resumed_behind_exactly(tmp_path, noticed, buffer, side):
    folder = write_shards(tmp_path / "data", 400, shard_rows=100)
    spoil_bytes_of_group(folder, "shard-00002.parquet", 2)
    data = training_data(folder, shuffle_buffer=buffer, shuffle_shards=side)
    data = replace(data, shards=find_shards(folder, on_notice=noticed.append))

    def windows(start=Position()):
        return [(rows.keys, place) for rows, place in windows_of_a_pass(data, start)]

    whole = windows()
    assert "shard-00002.parquet is damaged" in noticed[0]
    assert any(key == "picture-200" for keys, _ in whole for key in keys)
    for number, (_, position) in enumerate(whole):
        assert windows(position) == whole[number:]


def test_a_shard_that_is_mended_between_a_kill_and_the_next_start_changes_nothing_of_its_group(tmp_path, tokenizer):
    folder = write_shards(tmp_path / "data", 120, shard_rows=40)
    sound = (folder / "shard-00001.parquet").read_bytes()
    spoil_rows_from(folder, "shard-00001.parquet", 5)
    whole = list(islice(training_data(folder).batches(9, tokenizer, 6), 6))
    assert whole[-1][1].epoch == 0
    (folder / "shard-00001.parquet").write_bytes(sound)
    place = next(number for number, (_, position) in enumerate(whole) if position.lost)
    rest = islice(training_data(folder).batches(9, tokenizer, 6, whole[place][1]), 6 - place - 1)
    assert all(same(batch, wanted) for (batch, _), (wanted, _) in zip(rest, whole[place + 1 :], strict=True))


def test_a_pass_of_damaged_shards_only_is_refused(tmp_path):
    folder = write_shards(tmp_path / "data")
    for number in range(4):
        damage(folder, f"shard-0000{number}.parquet", 0.5)
    with pytest.raises(ValueError, match="no sample to train on in 4 shards; 4 were damaged"):
        next(training_data(folder).batches(5, Tokenizer.train(["a"], 300), 6))


def test_data_without_a_training_row_is_refused(shards):
    with pytest.raises(ValueError, match="no sample"):
        keys(training_data(shards, heldout_share=1 - 1e-9))


def test_the_captions_are_those_trained_on_in_the_order_of_the_shards(data, shards):
    stored = [row["caption"] for row in stored_rows(shards) if not is_heldout(row["key"], 0.1)]
    assert list(data.captions()) == stored


def test_mixed_captions_are_the_same_ones_in_another_order_of_the_shards_however_these_are_listed(data):
    def listed(order):
        paths, rows = ([column[place] for place in order] for column in (data.shards.paths, data.shards.rows))
        shards = replace(data.shards, paths=tuple(paths), rows=tuple(rows))
        return list(replace(data, shards=shards).mixed_captions())

    mixed = listed(range(4))
    assert mixed != list(data.captions())
    assert sorted(mixed) == sorted(data.captions())
    assert listed([3, 1, 0, 2]) == mixed


def empty_captions(data, tokenizer, count, batch_size=1):
    """Which of the first captions are of ids 0 only."""
    batches = islice(data.batches(batch_size, tokenizer, 6), count // batch_size)
    return torch.cat([(batch.text_ids == 0).all(dim=1) for batch, _ in batches]).tolist()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_share_asked_for_has_empty_captions_and_the_rest_stays_as_it_is(data, tokenizer, share):
    dropping = changed(data, caption_dropout=share).batches(50, tokenizer, 6)
    empty_count = 0
    for (batch, place), (whole, other_place) in islice(zip(dropping, data.batches(50, tokenizer, 6), strict=False), 40):
        empty = (batch.text_ids == 0).all(dim=1)
        empty_count += int(empty.sum())
        assert torch.equal(batch.text_ids[~empty], whole.text_ids[~empty])
        assert batch.text_ids.dtype == torch.int64
        assert torch.equal(batch.image_codes, whole.image_codes)
        assert place == other_place
    assert empty_count / 2000 == pytest.approx(share, abs=0.03 if 0 < share < 1 else 0)


def test_captions_are_dropped_one_by_one_whatever_the_size_of_a_batch(data, tokenizer):
    data = changed(data, caption_dropout=0.3)
    assert empty_captions(data, tokenizer, 240) == empty_captions(data, tokenizer, 240, batch_size=40)


def test_every_seed_peer_and_pass_drops_captions_of_its_own(data):
    data = changed(data, caption_dropout=0.5)
    seeded = [changed(data, seed=seed) for seed in (3, 4)]
    readers = [replace(one, identity=identity) for one in seeded for identity in ("", "alice", "bob")]
    rows = [f"picture-{number}" for number in range(120)]
    drawn = {tuple(reader.drops(key, epoch) for key in rows) for reader in readers for epoch in range(3)}
    assert len(drawn) == len(readers) * 3


def test_from_any_position_on_the_same_captions_are_dropped(data, tokenizer):
    data = changed(data, caption_dropout=0.5)
    whole = list(islice(data.batches(25, tokenizer, 6), 9))  # two passes
    for number, (_, position) in enumerate(whole[:-1], start=1):
        assert same(next(data.batches(25, tokenizer, 6, position))[0], whole[number][0])
