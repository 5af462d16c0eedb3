"""A step may learn from a part of each sample."""

import time

from training.run.draws import crop_of_step, step_generator

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


def test_any_seed_draws():
    assert step_generator(time.time_ns() * 1000, 3).initial_seed() >= 0
    assert step_generator(7, 3).initial_seed() == 7 * 1_000_003 + 3
