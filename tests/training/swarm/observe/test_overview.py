"""The state of a run, summarized from its peers' records."""

from dataclasses import replace

import pytest

pytest.importorskip("hivemind")

from training.commands.monitor import headline
from training.run.recipe import load_recipe
from training.swarm.averaging.attestation import Credit
from training.swarm.config import SwarmSection, SwarmSettings
from training.swarm.observe.overview import StepPace, run_state, summarize
from training.swarm.observe.peer_metrics import PeerMetrics, PeerRecord, PeerRecords

RECIPE = load_recipe("tiny")
SETTINGS = SwarmSettings(
    swarm=SwarmSection(name="monitored"),
    recipe=replace(
        RECIPE,
        data=replace(RECIPE.data, batch_size=64),
        schedule=replace(RECIPE.schedule, total_steps=100, warmup_steps=10),
    ),
)


def record(**fields):
    metrics = PeerMetrics(epoch=10, loss=2.0, samples=100, samples_per_s=4.0).record_fields()
    peer = {"role": "trainer", "client_mode": False, "version": "0.1.0", "user": None, "started": 1000.0}
    return PeerRecord(**{**metrics, **peer, "time": 1100.0, **fields})


def overview(*records, steps_per_s=0.5, refused=0):
    found = PeerRecords({f"peer{number}": one for number, one in enumerate(records)}, refused)
    return summarize(found, SETTINGS, steps_per_s)


def test_steps_and_loss_are_medians_that_one_liar_does_not_move():
    seen = overview(record(loss=2.0), record(loss=2.2), record(step=2**50, loss=1e15))
    assert (seen.step, seen.loss) == (10, 2.2)


def test_without_honest_trainers_a_made_up_step_goes_no_further_than_the_donors_or_the_schedule():
    liar = record(step=2**50)
    assert overview(liar).step == 100
    settings = replace(SETTINGS, swarm=replace(SETTINGS.swarm, donors=("donor",)))
    found = PeerRecords({"liar": liar, "donor": record(role="donor", step=7)}, 0)
    assert summarize(found, settings, None).step == 8


def test_a_made_up_speed_near_zero_tells_no_time():
    assert overview(record(samples_per_s=1e-311), steps_per_s=None).left_s is None


def test_speed_and_time_left_follow_from_the_pace_of_steps_not_from_what_peers_say():
    seen = overview(record(), record(samples_per_s=1e12), steps_per_s=0.5)
    assert seen.samples_per_s == 0.5 * 64
    assert seen.left_s == (100 - 10) / 0.5


def test_before_two_steps_were_seen_the_speed_is_what_peers_say():
    seen = overview(record(samples_per_s=24.0), record(samples_per_s=8.0), steps_per_s=None)
    assert (seen.samples_per_s, seen.reported_samples_per_s, seen.left_s) == (None, 32.0, 90 / 0.5)


def test_a_round_of_a_diloco_run_is_as_many_steps_as_each_peer_takes():
    settings = replace(SETTINGS, wire=replace(SETTINGS.wire, mode="diloco", inner_steps=30))
    seen = summarize(PeerRecords({"a": record(step=2)}, 0), settings, 0.1)
    assert (seen.step, seen.total_steps, seen.left_s) == (60, 100, 40 / 0.1)
    assert seen.samples_per_s == pytest.approx(0.1 * 64)


def test_only_trainers_count_and_one_without_a_loss_has_none():
    seen = overview(record(loss=None), record(role="donor", step=99), record(client_mode=True, loss=3.0))
    assert (seen.peers, seen.clients, seen.step, seen.loss) == (2, 1, 10, 3.0)
    assert overview(record(role="helper")) is None


def test_made_up_identities_count_for_nothing_once_helpers_say_whom_they_averaged():
    found = PeerRecords({"a": record(), "b": record(step=11), **{f"x{n}": record(step=2**50) for n in range(9)}}, 0)
    seen = summarize(found, SETTINGS, 0.5, {"a": Credit(samples=1.0), "b": Credit(samples=1.0), "gone": Credit()})
    assert (seen.step, seen.peers) == (10, 2)
    assert summarize(found, SETTINGS, 0.5, {"gone": Credit()}).peers == 11


def test_credited_liars_move_step_and_loss_only_with_half_of_the_work():
    honest, liars = {f"a{n}": record() for n in range(3)}, {f"x{n}": record(step=1, loss=0.0) for n in range(9)}
    found = PeerRecords({**honest, **liars}, 0)
    credits = {name: Credit(samples=100.0 if name in honest else 1.0) for name in found.by_peer}
    seen = summarize(found, SETTINGS, 0.5, credits)
    assert (seen.step, seen.loss, seen.peers) == (10, 2.0, 12)


WITH_DONOR = replace(SETTINGS, swarm=replace(SETTINGS.swarm, donors=("donor",)))
DONOR = record(role="donor", step=47, loss=2.5)


def test_a_trainer_that_did_most_of_the_work_and_left_no_longer_counts():
    found = {"Alice": record(role="left", step=31, loss=4.52), "Bob": record(step=47)}
    credits = {"Alice": Credit(samples=900.0), "Bob": Credit(samples=100.0)}
    seen = summarize(PeerRecords(found, 0), SETTINGS, 0.5, credits)
    assert (seen.step, seen.loss, seen.peers) == (47, 2.0, 1)


def test_a_trainer_that_did_most_of_the_work_and_died_holds_back_neither_step_nor_loss():
    found = {"Alice": record(step=31, loss=4.52), "Bob": record(step=46), "donor": DONOR}
    credits = {"Alice": Credit(samples=900.0), "Bob": Credit(samples=100.0)}
    seen = summarize(PeerRecords(found, 0), WITH_DONOR, 0.5, credits)
    assert (seen.step, seen.loss) == (47, 2.0)
    del found["Bob"]
    seen = summarize(PeerRecords(found, 0), WITH_DONOR, 0.5, credits)
    assert (seen.step, seen.loss) == (47, 4.52)


@pytest.mark.parametrize("lie", [{"role": "donor", "step": 90}, {"step": 90, "loss": 0.0}, {"step": 1, "loss": 0.0}])
def test_a_liar_with_less_than_half_of_the_work_changes_nothing_beside_a_donor(lie):
    found = {"a": record(step=47), "b": record(step=46), "liar": record(**lie), "donor": DONOR}
    credits = {"a": Credit(samples=300.0), "b": Credit(samples=300.0), "liar": Credit(samples=400.0)}
    seen = summarize(PeerRecords(found, 0), WITH_DONOR, 0.5, credits)
    assert (seen.step, seen.loss) == (47, 2.0)


def test_a_liar_counts_at_most_ten_faults_a_step_and_an_honest_peer_before_the_first_step():
    seen = overview(record(step=10), record(step=10, dropped_batches=3), record(step=10, dropped_batches=2**50))
    assert seen.counters["dropped_batches"] == 3 + 10 * (10 + 1)
    assert overview(record(step=0, dropped_batches=7)).counters["dropped_batches"] == 7


def test_of_as_many_liars_as_others_no_huge_loss_is_believed():
    assert overview(record(loss=2.0), record(loss=1e15)).loss == 2.0


def test_the_held_out_loss_is_what_the_runs_own_donors_say():
    settings = replace(SETTINGS, swarm=replace(SETTINGS.swarm, donors=("donor",)))
    found = {"a": record(), "donor": record(role="donor", loss=2.5), "liar": record(role="donor", loss=0.1)}
    assert summarize(PeerRecords(found, 0), settings, 0.5).heldout_loss == 2.5
    assert summarize(PeerRecords(found, 0), SETTINGS, 0.5).heldout_loss is None


def test_the_host_has_the_step_that_its_own_donors_say_however_far_the_trainers_are():
    settings = replace(SETTINGS, swarm=replace(SETTINGS.swarm, donors=("donor", "second")))
    found = {"a": record(step=100), "liar": record(role="donor", step=100), "donor": record(role="trainer", step=100)}
    credits = {"a": Credit(samples=1.0)}
    assert summarize(PeerRecords(found, 0), settings, 0.5, credits).host_step is None
    found |= {"donor": record(role="donor", step=53), "second": record(role="donor", step=52)}
    seen = summarize(PeerRecords(found, 0), settings, 0.5, credits)
    assert (seen.step, seen.host_step) == (100, 53)
    assert "step 100 of 100 (the host is at step 53)" in headline(seen)
    found["donor"] = record(role="donor", step=100)
    assert "step 100 of 100 ·" in headline(summarize(PeerRecords(found, 0), settings, 0.5, credits))
    assert overview(record(step=7)).host_step == 7  # of a run that names no donors


def test_what_was_dropped_is_added_up():
    seen = overview(record(dropped_batches=2), record(dropped_batches=1, skipped_steps=4, solo_steps=5), refused=3)
    dropped = {"dropped_batches": 3, "dropped_tensors": 0, "skipped_steps": 4, "solo_steps": 5, "resyncs": 0}
    assert seen.counters == {**dropped, "refused_records": 3}
    assert "3 batches dropped · 4 steps skipped · 5 steps taken alone · 3 records refused" in headline(seen)
    assert "1 batch dropped · 1 step taken alone" in headline(overview(record(dropped_batches=1, solo_steps=1)))


def test_refused_calls_are_told_of_once():
    def line(refused, before=0):
        seen = summarize(
            PeerRecords({"a": record()}, 0), SETTINGS, 0.5, admission={"passes": 2, "refused_calls": refused}
        )
        return headline(seen, before).partition(" left · ")[2]

    assert line(11) == "2 passes · 11 calls refused"
    assert line(11, 11) == "2 passes"
    assert line(12, 11) == "2 passes · 1 more call refused"
    assert line(3, 11) == "2 passes"  # a helper was started again


@pytest.mark.parametrize(
    ("trainers", "last_step", "is_answered", "state"),
    [
        (1, 99, False, "training"),
        (1, 100, True, "finished"),
        (0, 100, False, "finished"),
        (0, 99, False, "no answer"),
        (0, 0, True, "no trainers"),
    ],
)
def test_a_run_is_in_training_finished_stopped_or_waiting(trainers, last_step, is_answered, state):
    assert run_state(overview(*[record()] * trainers), last_step, 100, lambda: is_answered) == state


def test_the_pace_is_that_of_the_last_steps():
    pace = StepPace()
    assert pace.steps_per_s is None
    for step in range(100):
        pace.observe(step, 10.0 * step if step < 50 else 500.0 + 2.0 * (step - 50))
        pace.observe(step, 1e6)  # observations in between change nothing
    assert pace.steps_per_s == pytest.approx(0.5)
    pace.observe(20, 700.0)
    assert pace.steps_per_s is None  # the run was rolled back
