"""The run's progress, as shown before joining."""

from dataclasses import replace

import pytest

from tests.training.swarm.optimizer.test_progress_tracker import record
from training.run.recipe import Recipe
from training.swarm.config import SwarmSettings
from training.swarm.preflight.survey import check_progress, default_folder


@pytest.fixture(scope="module")
def settings():
    return SwarmSettings(recipe=Recipe())


def found(settings, *records):
    return check_progress(dict(enumerate(records)), settings).found


def test_a_run_is_where_its_peers_are(settings):
    assert found(settings, record(40), record(41)).startswith("2 trainers at step 41 of")
    assert found(settings, record(40, samples_per_second=0.0)).endswith(
        "nobody is training right now; the run is at step 40"
    )


def test_what_one_alone_claims_is_not_the_runs_step(settings):
    assert found(settings, record(40), record(40), record(settings.last_epoch)).startswith("2 trainers at step 40 of")


@pytest.mark.parametrize("said", [None, b"rubbish", [], {b"key": 3}])
def test_rubbish_is_nobody_who_trains(settings, said):
    assert check_progress(said, settings).found.endswith("nobody is training yet")


def test_numbers_that_cannot_be_true_are_not_shown(settings):
    broken = [record(10**300), record(40, samples_per_second=float("nan"))]
    fast = record(40, samples_per_second=1e308)
    assert found(settings, *broken, fast, record(40)).startswith("2 trainers at step 40 of")
    assert len(found(settings, *broken, fast, record(40))) < 80


def test_a_volunteer_keeps_its_folder_over_a_rollback(tmp_path):
    before = SwarmSettings()
    after, later = (replace(before, swarm=replace(before.swarm, name=f"{before.swarm.name}-back{n}")) for n in (1, 2))
    assert before.run_id != after.run_id
    assert {default_folder(tmp_path, one).name for one in (before, after, later)} == {before.run_id}
    (tmp_path / later.run_id).mkdir()  # of a version that had one for each name
    assert default_folder(tmp_path, later).name == later.run_id
