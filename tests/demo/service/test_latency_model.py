"""How long drawing takes."""

import math

import pytest

from demo.service import latency_model
from demo.service.latency_model import LatencyModel, measure


def test_a_batch_between_two_known_ones_is_interpolated_and_beyond_them_in_proportion(latency):
    assert latency.seconds_per_row(8) == 1.0
    assert latency.seconds_per_row(36) == 1.5
    assert latency.seconds_per_row(4) == 1.0
    assert latency.seconds_per_row(128) == 4.0


def test_a_prompt_takes_its_rows_and_its_decoding(latency):
    assert latency.seconds(64) == pytest.approx(4 * 2.0 + 64 * 0.1)
    assert latency.seconds(72) == pytest.approx(4 * (2.0 + 1.0) + 72 * 0.1)
    assert latency.seconds(64, guided=True) == pytest.approx(2 * 4 * 2.0 + 64 * 0.1)


@pytest.mark.parametrize(("row_s", "count"), [(0.001, 128), (1.0, 64), (2.0, 32), (100.0, 8)])
def test_a_slower_machine_draws_fewer_by_default(row_s, count):
    assert LatencyModel(8, {8: row_s / 4, 64: row_s}).affordable() == count


def test_batches_are_small_where_a_turn_would_take_long():
    assert LatencyModel(8, {8: 0.1, 64: 0.5}).batch_size() == 64
    assert LatencyModel(8, {8: 0.1, 64: 0.5}, largest_batch=16).batch_size() == 16
    assert LatencyModel(8, {8: 1.0, 64: 8.0}).batch_size() == 16
    assert LatencyModel(8, {8: 60.0}).batch_size() == 8


def test_what_is_drawn_is_learned_from(latency):
    for _ in range(50):
        latency.learn_row(64, 6.0)
        latency.learn_row(8, 8.0, guided=True)
        latency.learn_decoding(10, 5.0)
    assert latency.seconds_per_row(64) == pytest.approx(6.0, rel=0.01)
    assert latency.seconds_per_row(8) == pytest.approx(4.0, rel=0.01)
    assert latency.picture_s == pytest.approx(0.5, rel=0.01)


def test_the_first_measurement_of_a_drawing_replaces_that_of_the_startup(latency):
    latency.learn_row(64, 0.2)
    latency.learn_row(64, 0.4)
    latency.learn_decoding(10, 0.5)
    assert latency.seconds_per_row(64) == pytest.approx(0.3)
    assert latency.picture_s == pytest.approx(0.05)


@pytest.mark.parametrize("batch", [4, 8, 64])
def test_a_measurement_of_a_busy_moment_is_corrected_by_one_drawing_of_any_batch(batch):
    latency = LatencyModel(16, {8: 1.8, 64: 14.0})
    assert latency.affordable() == 8
    for _ in range(15):  # rows but the first
        latency.learn_row(batch, 0.05)
    latency.learn_decoding(batch, 0.01 * batch)
    assert latency.affordable() > 8
    assert latency.picture_s == pytest.approx(0.01)


def test_a_larger_batch_takes_at_least_as_long_for_a_row_but_no_longer_for_each_picture():
    latency = LatencyModel(4, {8: 1.0, 64: 2.0, 128: 3.0})
    latency.learn_row(16, 1.5)
    assert latency.row_s == {8: 1.0, 16: 1.5, 64: 2.0, 128: 3.0}
    latency.learn_row(32, 2.5)
    assert latency.row_s == {8: 1.0, 16: 1.5, 32: 2.5, 64: 2.5, 128: 3.0}
    latency.learn_row(4, 0.2)
    assert latency.row_s == {4: 0.2, 8: 0.4, 16: 0.8, 32: 1.6, 64: 2.5, 128: 3.0}


def test_the_measurement_knows_small_and_large_batches_and_decoding(generator, monkeypatch):
    # A busy machine leaves nothing out and affords as much as an idle one.
    monkeypatch.setattr(latency_model, "LONGEST_TURN_S", math.inf)
    monkeypatch.setattr(latency_model, "PATIENCE_S", math.inf)
    latency = measure(generator)
    assert set(latency.row_s) == {8, latency.largest_batch}
    assert all(seconds > 0 for seconds in latency.row_s.values())
    assert latency.picture_s > 0
    assert latency.affordable() == 128
