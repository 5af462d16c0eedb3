"""The folder of a machine that joins a run."""

from dataclasses import replace

from training.swarm.config import SwarmSettings
from training.swarm.preflight.checks import OK, PROBLEM
from training.swarm.preflight.survey import check_helpers, default_folder


def test_a_volunteer_keeps_its_folder_over_a_rollback(tmp_path):
    before = SwarmSettings()
    after, later = (replace(before, swarm=replace(before.swarm, name=f"{before.swarm.name}-back{n}")) for n in (1, 2))
    assert before.run_id != after.run_id
    assert {default_folder(tmp_path, one).name for one in (before, after, later)} == {before.run_id}
    (tmp_path / later.run_id).mkdir()  # of a version that had one for each name
    assert default_folder(tmp_path, later).name == later.run_id


def test_a_helper_answers_or_the_reason_why_none_does_is_said():
    answered, silent = check_helpers(object(), ""), check_helpers(None, "no answer in 15 s")
    assert (answered.level, answered.found, answered.fix) == (OK, "a helper answers", "")
    assert (silent.level, silent.found) == (PROBLEM, "no answer in 15 s")
    assert "ask the host for its address" in silent.fix
