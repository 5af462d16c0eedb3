"""The history of a run."""

import itertools
import json
from dataclasses import replace

import pytest

pytest.importorskip("hivemind")

from tests.training.swarm.observe.test_overview import overview, record
from training.swarm.observe.page.history import COLUMNS, MOST_POINTS, History


def look(history, steps, run_id="run-1", **fields):
    for step in steps:
        history.add(replace(overview(record(**fields)), step=step), run_id, now=float(step))


def test_a_long_run_is_thinned_evenly_and_has_its_first_and_its_latest_step(tmp_path):
    history = History(tmp_path / "history.json")
    look(history, range(1, 30_001))
    steps = history.columns()["step"]
    assert MOST_POINTS / 2 <= len(steps) <= MOST_POINTS
    assert steps[0] <= 32
    assert steps[-1] == 30_000
    gaps = [after - before for before, after in itertools.pairwise(steps[:-1])]
    assert 32 <= min(gaps) <= max(gaps) < 2 * 32


def test_the_file_does_not_grow(tmp_path):
    sizes = []
    for steps in (2_000, 20_000):
        history = History(tmp_path / f"{steps}.json")
        look(history, range(steps))
        history.save()
        sizes.append((tmp_path / f"{steps}.json").stat().st_size)
    assert sizes[1] < 2 * sizes[0]


def test_a_history_goes_on_after_a_restart(tmp_path):
    history = History(tmp_path / "history.json")
    look(history, range(1, 2001))
    history.save()
    again = History(tmp_path / "history.json")
    look(again, [2001])
    assert again.columns()["step"] == [*history.columns()["step"][: len(history.points)], 2001]
    assert set(again.columns()) == set(COLUMNS)


def test_a_history_of_an_earlier_version_ends_at_its_last_step(tmp_path):
    history = History(tmp_path / "history.json")
    look(history, [12])
    history.save()
    saved = json.loads(history.path.read_text())
    del saved["host_step"]
    history.path.write_text(json.dumps(saved))
    assert History(history.path).host_step == 12


def test_one_mad_look_among_many_leaves_no_trace(tmp_path):
    history = History(tmp_path / "history.json")
    look(history, range(1, 5000))
    look(history, [5000], loss=1e15)
    look(history, range(5001, 10_000))
    assert max(history.columns()["loss"]) == 2.0


def test_steps_that_a_rollback_gave_up_are_removed(tmp_path):
    history = History(tmp_path / "history.json")
    look(history, range(1, 100))
    look(history, [50, 51], run_id="run-2")
    assert history.columns()["step"] == [*range(1, 50), 50, 51]


def test_what_nobody_knows_is_left_out(tmp_path):
    history = History(tmp_path / "history.json")
    look(history, [1], loss=None)
    assert history.columns()["loss"] == [None]
