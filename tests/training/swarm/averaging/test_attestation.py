"""A reducer's record of whose gradients it averaged."""

import json

import pytest

from training.swarm.averaging import attestation
from training.swarm.averaging.attestation import Attestation, Credit, merge, parse_credits


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(attestation.time, "time", lambda: now[0])
    return now


def test_samples_and_the_time_between_steps_add_up_over_restarts(tmp_path, clock):
    for start in (1000.0, 5000.0):
        kept = Attestation(tmp_path / "credits.json")
        for step in range(3):
            clock[0] = start + 10 * step
            kept.add({"a": 8.0, "b": 4.0} if step else {"a": 8.0})
    found = parse_credits((tmp_path / "credits.json").read_text())
    assert found["a"] == Credit(48.0, seconds=40.0, samples_per_s=0.8, time=5020.0, counted_samples=48.0)
    assert found["b"] == Credit(16.0, seconds=20.0, samples_per_s=0.4, time=5020.0, counted_samples=16.0)


def test_a_peer_that_misses_every_other_step_has_a_speed(tmp_path, clock):
    kept = Attestation(tmp_path / "credits.json")
    for step in range(5):
        clock[0] = 1000.0 + 10 * step
        kept.add({"fast": 8.0} if step % 2 else {"fast": 8.0, "slow": 4.0})
    assert kept.credits["slow"].samples_per_s == 0.2
    assert kept.credits["fast"].samples_per_s == 0.8


def test_a_pause_of_the_run_is_no_computing(tmp_path, clock):
    kept = Attestation(tmp_path / "credits.json")
    for clock[0] in (0.0, 10.0, 1e6):
        kept.add({"a": 1.0})
    assert kept.credits["a"].seconds == 10 + attestation.MOST_STEP_S


def test_made_up_identities_push_out_no_peer_that_gave_more(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(attestation, "MOST_PEERS", 3)
    kept = Attestation(tmp_path / "credits.json")
    kept.add({"honest": 64.0})
    for number in range(10):
        kept.add({f"made-up{number}": 0.5})
    assert len(kept.credits) == 3
    assert kept.credits["honest"].samples == 64


def credits_of(folder, steps):
    """Of two helpers that average these steps, each a set of their names; the first of a step counts it for all."""
    for helpers in steps:
        for name in helpers:
            Attestation(folder / f"{name}.json").add({"a": 8.0}, counts=name == min(helpers))
    return [parse_credits((folder / f"{name}.json").read_text())["a"] for name in ("one", "two")]


def test_credits_of_two_helpers_count_every_step_once_whoever_averaged_it(tmp_path, clock):
    both, one, two = {"one", "two"}, {"one"}, {"two"}
    credits = credits_of(tmp_path, [both, both, one, two, two, both])
    assert [credit.samples for credit in credits] == [4 * 8.0, 5 * 8.0]
    assert merge(credits).samples == 6 * 8.0


def test_a_file_from_before_helpers_counted_for_all_still_gives_credit_and_never_twice(tmp_path, clock):
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text('{"a": {"samples": 800.0, "seconds": 60.0, "time": 900.0}}')
    assert merge(credits_of(tmp_path, [])).samples == 800.0
    assert merge(credits_of(tmp_path, [{"one", "two"}])).samples == 808.0


def test_merged_credits_have_the_speed_of_the_latest_and_the_seconds_of_the_one_that_measured_most():
    merged = merge([Credit(samples=8.0, seconds=90.0, samples_per_s=1.0, time=1.0), Credit(8.0, 60.0, 2.0, 2.0)])
    assert (merged.seconds, merged.samples_per_s, merged.time) == (90.0, 2.0, 2.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"a": 1}',
        '{"a": ["samples"]}',
        '{"a": {"samples": -1}}',
        '{"a": {"seconds": NaN}}',
        '{"a": {"samples": 1e300}}',
        '{"a": {"counted_samples": 1' + 400 * "0" + "}}",
    ],
)
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match=r"credits|Credit"):
        parse_credits(text)


def test_fields_of_a_later_version_are_ignored():
    assert parse_credits('{"a": {"samples": 8.0, "medals": 3}}') == {"a": Credit(8.0)}


def test_the_file_is_plain_json(tmp_path, clock):
    Attestation(tmp_path / "credits.json").add({"a": 8.0})
    assert json.loads((tmp_path / "credits.json").read_text())["a"]["samples"] == 8.0
