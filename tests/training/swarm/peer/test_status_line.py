"""The status line of a volunteer."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.tiny import DALLE_FIELDS
from training.run.recipe import Recipe
from training.swarm.config import SwarmSettings
from training.swarm.observe.peer_metrics import PeerMetrics
from training.swarm.peer.status_line import Download, PeerStatus, clock
from training.swarm.peer.trainer import Peer

BUSY = PeerStatus(
    step=12345,
    total_steps=31250,
    samples=2458,
    target=4096,
    left_s=83.2,
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
        "60 %",
        "1:24 left",
        "17 trainers",
        "3.21 samples/s",
        "loss 6.12",
        "gave 123,456 samples",
    ):
        assert part in line


def test_a_screen_of_80_columns_shows_what_counts():
    line = BUSY.line(80)
    for part in ("step 12345/31250", "60 %", "1:24 left", "3.21 samples/s", "loss 6.12"):
        assert part in line


def test_steps_taken_alone_are_told():
    assert "2 steps alone" in replace(BUSY, own=replace(BUSY.own, solo_steps=2)).line(140)
    assert "alone" not in BUSY.line(140)


def test_a_single_sample_is_told_in_the_singular():
    assert BUSY.line(140).endswith("gave 123,456 samples")
    assert replace(BUSY, own=replace(BUSY.own, samples=1)).line(140).endswith("gave 1 sample")


def test_what_is_not_known_yet_is_not_shown():
    line = PeerStatus(step=3, total_steps=30, samples=0, target=128).line(80)
    assert "nan" not in line
    assert "loss" not in line


def test_a_full_batch_is_being_averaged():
    assert "averaging" in PeerStatus(samples=130, target=128, left_s=math.inf).line(80)


def test_a_download_tells_how_far_and_how_fast():
    line = Download(received=25_000_000, total=100_000_000, seconds=10.0, donor="QmNo6TrsacLhMQyKC9wx8").line(80)
    for part in ("25 MB of 100 MB", "2.5 MB/s", "0:30 left", "KC9wx8"):
        assert part in line
    assert len(line) <= 80
    assert Download(received=0, total=100, seconds=0.0, donor="Qm").line(40)


@pytest.mark.parametrize(("seconds", "shown"), [(6.2, "0:07"), (60, "1:00"), (3723, "1:02:03"), (math.inf, "?")])
def test_times_are_short(seconds, shown):
    assert clock(seconds) == shown


@pytest.mark.parametrize(("ema", "shown"), [(1e-20, 8.0), (3.0, 3.0)])
def test_a_volunteers_speed_is_of_its_latest_batches_until_it_has_a_mean(ema, shown):
    volunteer = Peer.__new__(Peer)
    volunteer.settings = SwarmSettings(recipe=Recipe(model=DALLE_FIELDS))
    volunteer.metrics = PeerMetrics(samples=170, samples_per_s=8.0)
    volunteer.optimizer = SimpleNamespace(
        local_epoch=2,
        tracker=SimpleNamespace(
            trainers=2,
            global_progress=SimpleNamespace(samples_accumulated=40, eta_next_epoch=0.0),
            local_progress=SimpleNamespace(samples_per_second=ema),
        ),
    )
    assert volunteer.status().samples_per_s == shown
