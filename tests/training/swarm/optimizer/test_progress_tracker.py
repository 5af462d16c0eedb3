"""Which of the others' progress records a peer believes."""

import math

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import get_dht_time
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.timed_storage import ValueWithExpiration

from training.swarm.network.owner_keys import owner_peer
from training.swarm.optimizer.progress_tracker import MAX_BATCHES_PER_STEP, DonorTracker, HelperTracker, SwarmTracker

TARGET = 128
LAST = 1000
DONOR, STRANGER = (RSASignatureValidator(RSAPrivateKey()).local_public_key for _ in "ab")


@pytest.fixture
def tracker_at(dht):
    """A tracker of a peer at this step, without its process."""

    def make(epoch, kind=SwarmTracker, **options):
        tracker = kind(
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


def said(tracker, *records, own=None, donor=None):
    """How far the swarm is by what others and this peer say.

    Args:
        own: in place of this peer's record: one of before it was restarted.
        donor: signed by DONOR.
    """
    signed = {tracker._local_public_key: own or record(tracker.local_progress.epoch)}
    if donor is not None:
        signed[DONOR] = donor
    tracker.global_progress = tracker._parse_swarm_progress_data({**signed, **dict(enumerate(records))})
    return tracker.global_progress


def test_a_newcomer_whose_own_record_is_not_stored_yet_is_not_alone_beside_a_donor(tracker_at):
    newcomer, helper = tracker_at(0), tracker_at(0, HelperTracker)
    assert newcomer._parse_swarm_progress_data({DONOR: record(0)}).num_peers == 2
    assert said(newcomer, donor=record(0)).num_peers == 2
    assert helper._parse_swarm_progress_data({DONOR: record(0)}).num_peers == 1  # it takes no steps


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
    assert (progress.epoch, progress.num_peers) == (8, 3)


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


def test_a_helper_is_where_most_trainers_are(tracker_at):
    for own, others, reach in ((40, (40, 40, LAST), 40), (40, (50, 50), 50), (90, (40, 40, 41), 40), (40, (), 40)):
        tracker = tracker_at(own, kind=HelperTracker)
        said(tracker, *map(record, others), own=record(own, samples_per_second=0.0))
        assert tracker.believed_epoch == reach


@pytest.fixture
def anchored_at(tracker_at):
    """A tracker that knows the run's donor."""
    return lambda epoch, **options: tracker_at(epoch, donors={owner_peer(DONOR)}, **options)


@pytest.mark.parametrize("claims", [[LAST] * 2, [LAST] * 50, [42] * 50, [42, 43, 44]])
def test_no_step_is_believed_beyond_the_donors_by_more_than_one_however_many_claim_it(anchored_at, claims):
    progress = said(anchored_at(40), record(40), *map(record, claims), donor=record(40, samples_accumulated=0))
    assert (progress.epoch, progress.num_peers, progress.samples_accumulated) == (40, 3, 20)


def test_a_step_that_the_donor_is_about_to_take_is_believed(anchored_at):
    assert said(anchored_at(40), record(41), donor=record(40)).epoch == 41


def test_who_is_behind_goes_where_the_donor_is(anchored_at):
    for kind in (SwarmTracker, DonorTracker):
        assert said(anchored_at(0, kind=kind), record(500), donor=record(40)).epoch == 40


def test_only_the_donors_own_key_makes_an_anchor(anchored_at):
    tracker = anchored_at(7)
    forged = {STRANGER: record(40), DONOR + b"x": record(40), "donor": record(40)}
    tracker._parse_swarm_progress_data({**forged, DONOR: record(7)})
    assert (tracker.donor_epoch, tracker.believed_epoch) == (7, 8)


def test_while_the_donor_is_away_peers_go_on_from_step_to_step(anchored_at):
    tracker = anchored_at(40)
    said(tracker, record(40), donor=record(40))
    for epoch in range(40, 45):
        tracker.local_progress = tracker._get_local_progress(epoch, 0)
        assert said(tracker, record(epoch), record(LAST), record(LAST)).epoch == epoch
        assert said(tracker, record(epoch + 1), record(LAST), record(LAST)).epoch == epoch + 1


def test_who_is_ahead_of_a_donor_that_came_back_goes_on(anchored_at):
    progress = said(anchored_at(143), record(143), donor=record(88))
    assert (progress.epoch, progress.samples_accumulated) == (143, 20)


def test_a_newcomer_while_the_donor_is_away_believes_what_two_confirm(anchored_at):
    assert said(anchored_at(0), record(40), record(40)).epoch == 40


@pytest.mark.parametrize("claims", [[41], [LAST] * 9])
def test_a_helper_is_where_the_donor_is_whatever_others_claim(anchored_at, claims):
    tracker = anchored_at(40, kind=HelperTracker)
    progress = said(tracker, record(40), *map(record, claims), donor=record(40))
    assert (tracker.believed_epoch, progress.epoch, progress.samples_accumulated) == (40, 40, 30)


def test_a_helper_that_has_just_taken_a_step_counts_the_samples_of_the_next(anchored_at):
    progress = said(anchored_at(41, kind=HelperTracker), record(41), record(42), donor=record(40))
    assert (progress.epoch, progress.samples_accumulated) == (41, 20)


@pytest.mark.parametrize("claims", [[LAST], [LAST] * 9])
def test_no_claim_takes_a_donor_anywhere(anchored_at, claims):
    tracker = anchored_at(40, kind=DonorTracker)
    progress = said(tracker, *[record(40)] * (1 + len(claims)), *map(record, claims))
    assert (progress.epoch, tracker.believed_epoch) == (40, 41)


def test_a_donor_that_most_have_left_behind_looks_for_them_without_believing_their_step(anchored_at):
    progress = said(anchored_at(88, kind=DonorTracker), record(143), record(143), record(144))
    assert (progress.epoch, progress.num_peers, progress.samples_accumulated) == (89, 4, 0)
