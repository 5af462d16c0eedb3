import json

import numpy as np
import pytest

from benchmarks.streaming import IMAGE_SIDE, codes, measure, report, write_shards
from tests.preprocessing.shard_folders import stored_rows


@pytest.mark.long
def test_the_synthetic_shards_are_read_as_any_other_and_every_figure_is_reported(tmp_path, capsys):
    write_shards(tmp_path / "shards", 600, 100)
    assert len({row["key"] for row in stored_rows(tmp_path / "shards")}) == 600
    found = measure(tmp_path / "shards", batch_size=32, shuffle_buffer=100)
    report(found)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.count("|") == 4 and "---" not in line for line in lines) == 8
    assert set(json.loads(json.dumps(found))) >= {"phases", "stream", "stream_ahead", "resume_s"}
    assert all(pace["samples_per_s"] > 0 for pace in found["phases"].values())
    assert len(found["stream_ahead"]["resident_bytes"]) > 5


def test_a_code_in_eight_is_the_one_before():
    drawn = codes(200, np.random.default_rng(0))
    assert drawn.shape == (200, IMAGE_SIDE**2)
    repeated = (drawn[:, 1:] == drawn[:, :-1]).mean()
    assert 0.12 < repeated < 0.14
