"""Progress: pictures that are done, of how many."""

import time
from types import SimpleNamespace

import pytest

from preprocessing.encoding.encode import Reporter, preprocess
from preprocessing.sources import open_source
from preprocessing.sources.folder import ListedFolder


class OfUnknownSize(ListedFolder):
    def size(self, part):
        return None


def test_progress_guesses_the_total_where_sizes_are_unknown(discs):
    steps = []
    report = Reporter(OfUnknownSize(discs, 8), [0, 1, 2], lambda *step: steps.append(step))
    report(0, 4, False)
    report(0, 6, True)
    report(1, 2, False)
    assert steps == [(4, 12, "0 of 3 shards"), (6, 18, "1 of 3 shards"), (8, 18, "1 of 3 shards")]


def test_a_report_takes_no_longer_with_many_parts():
    steps = []
    report = Reporter(SimpleNamespace(size=lambda part: 10), range(200_000), lambda *step: steps.append(step))
    started_s = time.monotonic()
    for seen in range(1, 1001):
        report(seen // 10, seen % 10, seen % 10 == 9)
    assert time.monotonic() - started_s < 1
    assert steps[-1] == (900, 1_999_900, "100 of 200,000 shards")


def test_progress_counts_the_pictures_of_this_run(discs, vqgan, tmp_path):
    (discs / "029.png").unlink()
    steps = []
    preprocess(
        open_source(discs, 8), tmp_path / "out", vqgan, batch_size=4, on_progress=lambda *step: steps.append(step)
    )
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1][:2] == (30, 30)
    preprocess(
        open_source(discs, 8),
        tmp_path / "out",
        vqgan,
        batch_size=4,
        on_progress=lambda *step: pytest.fail("work was repeated"),
    )
