"""Learning rates rise, hold and fall."""

import pytest

from training.run.rates import learning_rate


def rates(warmup_steps, total_steps, hold_steps=0):
    settings = {"peak": 2.0, "warmup_steps": warmup_steps, "hold_steps": hold_steps, "total_steps": total_steps}
    return [learning_rate(step, **settings) for step in range(1, total_steps + 1)]


def test_the_rate_rises_to_its_peak_and_falls_by_equal_steps():
    assert rates(2, 5) == pytest.approx([1.0, 2.0, 1.5, 1.0, 0.5])


def test_without_warm_up_the_first_step_is_the_largest():
    assert rates(0, 4) == pytest.approx([1.6, 1.2, 0.8, 0.4])


def test_a_run_that_is_all_warm_up_ends_at_the_peak():
    assert rates(4, 4) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_held_steps_are_at_the_peak_and_the_fall_comes_after_them():
    assert rates(2, 8, hold_steps=3) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5])


def test_a_run_that_is_made_longer_while_it_holds_had_the_same_rates():
    assert rates(2, 8, hold_steps=3)[:5] == rates(2, 12, hold_steps=7)[:5]


def test_after_the_end_nothing_is_learnt():
    assert learning_rate(7, peak=2.0, warmup_steps=2, total_steps=5) == 0
