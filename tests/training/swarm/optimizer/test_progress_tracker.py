"""What a peer believes of what others say about how far they are."""

import math

import pytest
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import ValueWithExpiration

from training.swarm.optimizer.progress_tracker import MAX_BATCHES_PER_STEP, SwarmTracker

TARGET = 128
LAST = 1000


@pytest.fixture
def tracker_at(dht):
    """A tracker whose own peer has gone so many steps; it is not started."""

    def make(epoch, **options):
        tracker = SwarmTracker(
            dht, "test", TARGET, client_mode=False, last_epoch=LAST, metadata_expiration=60.0, start=False, **options
        )
        tracker.local_progress = tracker._get_local_progress(epoch, 0)
        return tracker

    return make


def record(epoch, **changes):
    content = {
        "peer_id": b"peer",
        "epoch": epoch,
        "samples_accumulated": 10,
        "samples_per_second": 4.0,
        "time": get_dht_time(),
        "client_mode": False,
    }
    return ValueWithExpiration({**content, **changes}, get_dht_time() + 60)


def said(tracker, *records):
    """How far the swarm is by what others and this peer say."""
    own = {tracker._local_public_key: record(tracker.local_progress.epoch)}
    tracker.global_progress = tracker._parse_swarm_progress_data({**own, **dict(enumerate(records))})
    return tracker.global_progress


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(record(LAST + 1), id="a step too many"),
        pytest.param(record(-1), id="a step before the first"),
        pytest.param(record("40"), id="a step in words"),
        pytest.param(record(40.0), id="a float"),
        pytest.param(record(True), id="a bool"),
        pytest.param(record(40, samples_accumulated=-1), id="samples missing"),
        pytest.param(record(40, samples_accumulated=10**18), id="too many samples"),
        pytest.param(record(40, samples_per_second=math.inf), id="infinite speed"),
        pytest.param(record(40, samples_per_second=math.nan), id="no speed"),
        pytest.param(record(40, time=math.inf), id="no time"),
        pytest.param(record(40, client_mode="no"), id="a mode in words"),
        pytest.param(ValueWithExpiration({"epoch": 40}, 1e12), id="a step alone"),
        pytest.param(ValueWithExpiration(None, 1e12), id="nothing"),
        pytest.param(b"rubbish", id="rubbish"),
    ],
)
def test_a_record_that_cannot_be_true_is_left_out(tracker_at, broken):
    progress = said(tracker_at(7), record(7), broken)
    assert (progress.epoch, progress.num_peers, progress.samples_accumulated) == (7, 2, 20)


def test_rubbish_in_place_of_all_records_leaves_this_peer_alone(tracker_at):
    tracker = tracker_at(7)
    for rubbish in (b"rubbish", [], {}, {b"key": 3}):
        assert tracker._parse_swarm_progress_data(rubbish).epoch == 7


def test_a_step_does_not_come_sooner_than_the_samples_of_a_step_may(tracker_at):
    progress = said(
        tracker_at(7), record(7, samples_accumulated=MAX_BATCHES_PER_STEP * TARGET, samples_per_second=1e300)
    )
    assert progress.samples_accumulated <= TARGET + 10
    started = get_dht_time()
    progress = said(tracker_at(7), record(7, samples_accumulated=0, samples_per_second=1e300))
    assert progress.eta_next_epoch > started + 0.4
    progress = said(tracker_at(7), record(7, samples_per_second=0.1, time=0.0))
    assert progress.eta_next_epoch > started + 1


def test_peers_in_client_mode_count_as_all_others(tracker_at):
    progress = said(tracker_at(7), record(8, client_mode=True), record(8))
    assert (progress.epoch, progress.num_peers, progress.num_clients) == (8, 3, 1)


@pytest.mark.parametrize(
    ("own", "others", "swarm"),
    [
        (0, [], 0),
        (0, [0, 0], 0),
        (0, [900, 900], 900),
        (0, [900, 901], 901),
        (0, [900], 900),
        (900, [0], 900),
        (40, [50, 50], 50),
        (50, [40, 40], 50),
        (40, [40, 50], 50),
        (40, [41, 40], 41),
    ],
    ids=[
        "a swarm of one",
        "all newcomers",
        "a late newcomer",
        "a newcomer in the middle of a step",
        "one before this one",
        "a newcomer beside this one",
        "the smaller part of a parted swarm",
        "the part of one that went ahead",
        "one that went ahead",
        "one that has just taken the step",
    ],
)
def test_the_swarm_is_where_its_first_peer_is(tracker_at, own, others, swarm):
    assert said(tracker_at(own), *map(record, others)).epoch == swarm


@pytest.mark.parametrize(
    ("own", "others", "lone", "without"),
    [
        (40, [40, LAST], True, 40),
        (0, [40, 41, LAST], True, 41),
        (0, [40, LAST], True, 40),
        (40, [40, LAST - 2, LAST], True, 40),
        (40, [50, 50], False, 50),
        (40, [41, 40], False, 41),
        (40, [LAST], False, LAST),
        (50, [40, 40], False, 50),
    ],
)
def test_what_one_peer_alone_says_is_left_out_once_it_is_doubted(tracker_at, own, others, lone, without):
    tracker = tracker_at(own)
    said(tracker, *map(record, others))
    assert tracker.relies_on_lone_claim == lone
    assert tracker.doubt_lone_claims() == tracker.global_epoch == without
    assert said(tracker, *map(record, others)).epoch == without
    assert not tracker.relies_on_lone_claim
    tracker.doubtful_until = get_dht_time() - 1
    assert said(tracker, *map(record, others)).epoch == max(own, *others)


def test_who_has_no_weights_believes_no_lone_claim(tracker_at):
    tracker = tracker_at(40, doubtful=True)
    assert said(tracker, record(40), record(LAST)).epoch == 40
    assert said(tracker, record(50), record(50)).epoch == 50
