import pytest

from training.run.schedule import crop_of_step, learning_rate


def rates(warmup_steps, total_steps):
    settings = {"peak": 2.0, "warmup_steps": warmup_steps, "total_steps": total_steps}
    return [learning_rate(step, **settings) for step in range(1, total_steps + 1)]


def test_the_rate_rises_to_its_peak_and_falls_by_equal_steps():
    assert rates(2, 5) == pytest.approx([1.0, 2.0, 1.5, 1.0, 0.5])


def test_without_warm_up_the_first_step_is_the_largest():
    assert rates(0, 4) == pytest.approx([1.6, 1.2, 0.8, 0.4])


def test_a_run_that_is_all_warm_up_ends_at_the_peak():
    assert rates(4, 4) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_after_the_end_nothing_is_learnt():
    assert learning_rate(7, peak=2.0, warmup_steps=2, total_steps=5) == 0


STAGES = ((3, 4, 2), (5, 6, 3))


def crops(steps, seed=0):
    return [crop_of_step(step, STAGES, image_side=4, seed=seed) for step in steps]


def test_the_lengths_are_those_of_their_stage_and_in_the_end_everything():
    found = crops(range(1, 8))
    assert [crop and (crop.text_len, crop.side) for crop in found] == [(4, 2)] * 3 + [(6, 3)] * 2 + [None] * 2


def test_the_square_follows_from_seed_and_step_alone():
    assert crops([2, 3]) == [crops([2])[0], crops([3])[0]]
    assert crops([1, 2, 3]) != crops([1, 2, 3], seed=1)


def test_squares_lie_anywhere_in_the_picture():
    found = [crop_of_step(step, [(1000, 4, 2)], image_side=4, seed=0) for step in range(1, 200)]
    assert {(crop.row, crop.column) for crop in found} == {(row, column) for row in range(3) for column in range(3)}
