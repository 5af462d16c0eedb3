import json
from itertools import islice

import pytest
import torch

from dalle_lean.tokenizer import Tokenizer
from preprocessing.shards import open_stream
from tests.training.conftest import write_shards
from training.data import Batch, Position, TrainingData, captions, collate, drop_captions, heldout_rows, is_heldout


@pytest.fixture
def data(shards):
    return TrainingData(folder=shards, heldout_share=0.1, shuffle_buffer=16, seed=3)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a red heart", "a blue book"], 300)


def keys(rows):
    return [row["key"] for row in rows]


def test_a_pass_has_every_training_row_once_in_another_order_than_the_shards(data, shards):
    stored = [row["key"] for row in open_stream(shards) if not is_heldout(row["key"], 0.1)]
    order = keys(data.epoch(0))
    assert sorted(order) == sorted(stored)
    assert order != stored


def test_the_order_follows_from_the_seed_and_the_pass(data, shards):
    other_seed = TrainingData(folder=shards, heldout_share=0.1, shuffle_buffer=16, seed=4)
    assert keys(data.epoch(0)) == keys(data.epoch(0))
    assert keys(data.epoch(0)) != keys(data.epoch(1))
    assert keys(data.epoch(0)) != keys(other_seed.epoch(0))


def test_from_any_position_on_the_batches_are_those_of_an_uninterrupted_reader(data, tokenizer):
    whole = list(islice(data.batches(25, tokenizer, 6), 9))  # two passes
    assert whole[-1][1].epoch == 2
    for number, (_, position) in enumerate(whole[:-1], start=1):
        batch, _ = next(data.batches(25, tokenizer, 6, position))
        wanted, _ = whole[number]
        assert torch.equal(batch.text_ids, wanted.text_ids)
        assert torch.equal(batch.image_codes, wanted.image_codes)


def test_a_batch_has_the_captions_and_codes_of_its_rows(data, tokenizer):
    rows = list(islice(data.epoch(0), 3))
    batch = collate(rows, tokenizer, 6)
    assert batch.text_ids.shape == (3, 6)
    assert batch.image_codes.tolist() == [list(row["codes"]) for row in rows]
    assert torch.equal(batch.text_ids, tokenizer.encode([row["caption"] for row in rows], 6))


def test_what_is_held_out_is_never_trained_on(data):
    heldout = keys(heldout_rows(data, None, 1000))
    assert 0 < len(heldout) < 40
    assert not set(heldout) & set(keys(data.epoch(0)))
    assert len(heldout) + len(list(captions(data))) == 120


def test_shards_of_their_own_can_be_held_out(data, shards):
    assert len(heldout_rows(data, shards, 50)) == 50


def test_held_out_rows_are_a_fair_sample_that_does_not_depend_on_their_order(data, tmp_path):
    sorted_shards = write_shards(tmp_path / "sorted", 600)
    places = sorted(int(key.removeprefix("picture-")) for key in keys(heldout_rows(data, sorted_shards, 150)))
    quarters = [sum(start <= place < start + 150 for place in places) for start in range(0, 600, 150)]
    assert all(25 <= quarter <= 50 for quarter in quarters)
    assert len(set(places)) == 150

    info = json.loads((sorted_shards / "dataset.json").read_text())
    info["shards"].reverse()
    (sorted_shards / "dataset.json").write_text(json.dumps(info))
    assert sorted(int(key.removeprefix("picture-")) for key in keys(heldout_rows(data, sorted_shards, 150))) == places


def test_the_hash_holds_out_the_share_asked_for():
    share = sum(is_heldout(f"key-{index}", 0.2) for index in range(5000)) / 5000
    assert 0.18 < share < 0.22
    assert not is_heldout("any", 0.0)


def test_data_without_a_training_row_is_refused(shards):
    nothing = TrainingData(folder=shards, heldout_share=1.0, shuffle_buffer=16, seed=0)
    with pytest.raises(ValueError, match="no sample"):
        next(nothing.samples(Position()))


def full_batch(size):
    return Batch(torch.arange(1, size * 6 + 1).reshape(size, 6), torch.arange(size * 4).reshape(size, 4))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_share_asked_for_has_empty_captions_and_the_rest_stays_as_it_is(share):
    batch = full_batch(4000)
    dropped = drop_captions(batch, share, seed=0, step=1)
    empty = (dropped.text_ids == 0).all(dim=1)
    assert empty.float().mean().item() == pytest.approx(share, abs=0.03 if 0 < share < 1 else 0)
    assert torch.equal(dropped.text_ids[~empty], batch.text_ids[~empty])
    assert dropped.text_ids.dtype == torch.int64
    assert torch.equal(dropped.image_codes, batch.image_codes)
    assert batch.text_ids.all()


def test_which_captions_are_dropped_follows_from_seed_and_step_alone():
    def dropped(seed, step):
        return (drop_captions(full_batch(64), 0.5, seed=seed, step=step).text_ids == 0)[:, 0].tolist()

    first = dropped(0, 1)
    torch.rand(1)
    state = torch.get_rng_state()
    assert dropped(0, 1) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert len({tuple(dropped(seed, step)) for seed in range(3) for step in range(3)}) == 9
