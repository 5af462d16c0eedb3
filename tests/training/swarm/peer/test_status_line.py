"""The status line of a volunteer."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.tiny import DALLE_FIELDS
from training.run.recipe import Recipe
from training.swarm.config import SwarmSettings
from training.swarm.observe.overview import StepPace
from training.swarm.observe.peer_metrics import PeerMetrics
from training.swarm.peer.status_line import EMPTY, FULL, PeerStatus, clock, download_line, summary
from training.swarm.peer.trainer import Peer

BUSY = PeerStatus(
    step=12345,
    total_steps=31250,
    left_s=8000.0,
    next_step_s=83.2,
    trainers=17,
    samples_per_s=3.21,
    own=PeerMetrics(samples=123456, loss=6.1234),
)


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_the_line_never_is_wider_than_the_screen(width):
    for status in (BUSY, PeerStatus()):
        assert len(status.line(width)) <= width


def test_a_wide_screen_shows_all_of_it():
    line = BUSY.line(120)
    for part in (
        "12345/31250",
        "2:13:20 left",
        "next step in 1:24",
        "17 trainers",
        "3.21 samples/s",
        "loss 6.12",
        "gave 123,456 samples",
    ):
        assert part in line


def test_a_screen_of_80_columns_shows_what_counts():
    line = BUSY.line(80)
    for part in ("step 12345/31250", "2:13:20 left", "3.21 samples/s", "loss 6.12"):
        assert part in line


def test_steps_taken_alone_are_told():
    assert "2 steps alone" in replace(BUSY, own=replace(BUSY.own, solo_steps=2)).line(140)
    assert "alone" not in BUSY.line(140)


def test_a_single_sample_is_told_in_the_singular():
    assert BUSY.line(140).endswith("gave 123,456 samples")
    assert replace(BUSY, own=replace(BUSY.own, samples=1)).line(140).endswith("gave 1 sample")


def test_what_is_not_known_yet_is_not_shown():
    line = PeerStatus(step=3, total_steps=30).line(80)
    assert not any(word in line for word in ("nan", "?", "left", "next", "loss"))
    assert "next" not in replace(BUSY, next_step_s=5e19).line(120)  # as hivemind estimates without a speed


def test_the_bar_is_of_the_whole_run():
    half = PeerStatus(step=30, total_steps=60).line(120)
    assert half.count(FULL) == half.count(EMPTY) == 15


def test_a_full_batch_is_being_averaged():
    line = replace(BUSY, next_step_s=0.0).line(120)
    assert "  averaging  " in line
    assert "next step" not in line


def test_a_download_tells_how_far_and_how_fast():
    line = download_line(25_000_000, 100_000_000, "QmNo6TrsacLhMQyKC9wx8", 10.0, 80)
    for part in ("25 MB of 100 MB", "2.5 MB/s", "0:30 left", "KC9wx8"):
        assert part in line
    assert len(line) <= 80


@pytest.mark.parametrize(
    ("received", "seconds", "tail"),
    [(0, 0.0, "0 B of 1 kB"), (1000, 0.0, "1 kB of 1 kB"), (1000, 2.0, "1 kB of 1 kB, 500 B/s")],
)
def test_a_download_that_has_just_begun_or_is_complete_tells_no_time_left(received, seconds, tail):
    line = download_line(received, 1000, "QmNo6Trs", seconds, 80)
    assert line.endswith(f" {tail}, from QmNo6Trs")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(6.2, "0:07"), (60, "1:00"), (3723, "1:02:03"), (400_000, "5 days"), (math.inf, "?")]
)
def test_times_are_short(seconds, shown):
    assert clock(seconds) == shown


@pytest.fixture
def volunteer():
    made = Peer.__new__(Peer)
    made.watch = SimpleNamespace(over=False)
    made.settings = SwarmSettings(recipe=Recipe(model=DALLE_FIELDS))
    made.metrics, made.pace = PeerMetrics(samples=170, samples_per_s=8.0), StepPace()
    made.optimizer = SimpleNamespace(
        local_epoch=2,
        tracker=SimpleNamespace(
            trainers=2,
            donor_epoch=None,
            global_progress=SimpleNamespace(eta_next_epoch=0.0),
            local_progress=SimpleNamespace(samples_per_second=0.0),
        ),
    )
    return made


@pytest.mark.parametrize(("ema", "shown"), [(1e-20, 8.0), (3.0, 3.0)])
def test_a_volunteers_speed_is_of_its_latest_batch_until_it_has_a_mean(volunteer, ema, shown):
    volunteer.optimizer.tracker.local_progress.samples_per_second = ema
    assert volunteer.status().samples_per_s == shown


def test_the_time_left_is_of_the_run_at_the_pace_of_its_latest_steps(volunteer):
    assert math.isnan(volunteer.status().left_s)
    for epoch, now_s in ((0, 100.0), (0, 105.0), (1, 110.0), (2, 120.0)):
        volunteer.pace.observe(epoch, now_s)
    assert volunteer.status().left_s == 10.0 * (volunteer.settings.last_epoch - 2)


def test_a_volunteer_that_leaves_a_run_that_is_over_is_told_so(volunteer, tmp_path):
    assert "left at step 2 of" in summary(volunteer.status(), tmp_path)
    volunteer.watch.over = True
    last = volunteer.settings.total_steps
    assert summary(volunteer.status(), tmp_path) == f"the run finished at step {last}; this machine gave 170 samples"
