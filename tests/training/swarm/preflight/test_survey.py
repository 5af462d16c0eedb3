"""The folder of a machine that joins a run."""

from dataclasses import replace

from training.swarm.config import SwarmSettings
from training.swarm.preflight.survey import default_folder


def test_a_volunteer_keeps_its_folder_over_a_rollback(tmp_path):
    before = SwarmSettings()
    after, later = (replace(before, swarm=replace(before.swarm, name=f"{before.swarm.name}-back{n}")) for n in (1, 2))
    assert before.run_id != after.run_id
    assert {default_folder(tmp_path, one).name for one in (before, after, later)} == {before.run_id}
    (tmp_path / later.run_id).mkdir()  # of a version that had one for each name
    assert default_folder(tmp_path, later).name == later.run_id
