"""Whose state a peer adopts that is behind, by the others' records and the donors' answers."""

import os
import signal
import time
from itertools import repeat
from multiprocessing import Process
from types import SimpleNamespace

import hivemind
import pytest
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, get_dht_time
from hivemind.utils.crypto import RSAPrivateKey

from dalle_lean.progress import silent
from tests.training.swarm.averaging.test_averagers import resting_state_averager
from tests.training.swarm.optimizer.test_progress_tracker import LAST, TARGET, record, said
from training.swarm.averaging.state_validation import (
    StateRefused,
    check_epoch,
    sign_state,
    state_signer,
    tensors_sha256,
)
from training.swarm.host_peers import HostPeers
from training.swarm.network.owner_keys import owner_peer
from training.swarm.optimizer import swarm_optimizer as stepping
from training.swarm.optimizer.progress_tracker import DonorTracker, HelperTracker, SwarmTracker
from training.swarm.optimizer.swarm_optimizer import NoGroup, OutOfSync, ProcessEnded, SwarmOptimizer

DONOR = PeerID(bytes([0x12, 0x20]) + bytes(32))
STRANGERS = [PeerID(bytes([0x12, 0x20]) + bytes([number]) * 32) for number in (1, 2)]


@pytest.fixture
def averager(dht):
    return resting_state_averager(LAST, dht, host=HostPeers(donors=frozenset({DONOR})))


@pytest.fixture
def newcomer(dht, averager, monkeypatch):
    """A trainer at step 0, without threads and processes.

    `answers` are the steps of the states that the run's donor hands out, None where it does not; strangers that claim
    to have the last step's do not answer.
    """
    monkeypatch.setattr(stepping, "RETRY_PAUSE_S", 0.0)
    optimizer = SwarmOptimizer.__new__(SwarmOptimizer)
    optimizer.tracker = SwarmTracker(dht, "test", TARGET, client_mode=False, last_epoch=LAST, start=False)
    optimizer.state_averager = averager
    optimizer.is_donor, optimizer.client_mode = False, True
    optimizer.grad_averager = SimpleNamespace(
        reset_accumulated_grads_=lambda: None, notify_used_averaged_gradients=lambda: None
    )
    optimizer.scheduled_grads = None
    optimizer.load_state_attempts, optimizer.load_state_timeout = 5, 10.0
    optimizer.resyncs = optimizer.resyncs_in_row = 0
    optimizer._should_check_synchronization_on_update = False
    optimizer.on_notice = silent
    optimizer.answers = iter(())

    def download(donor, timeout, min_epoch=0):
        epoch = next(optimizer.answers) if donor == DONOR else None
        if epoch is None:
            raise StateRefused("does not answer")
        check_epoch({"epoch": epoch}, min_epoch)
        state = [torch.full((5,), float(epoch))]
        return {"epoch": epoch, "sha256": tensors_sha256(state)}, state

    monkeypatch.setattr(averager, "download", download)
    monkeypatch.setattr(averager, "announced_donors", lambda: dict.fromkeys(STRANGERS, float(LAST)))
    averager.validate = lambda _: None
    return optimizer


def test_a_newcomer_takes_no_part_without_the_state_of_the_others_when_one_more_claims_a_step(newcomer):
    said(newcomer.tracker, record(40), record(LAST))
    newcomer.answers = iter([None, None, 40])
    newcomer.load_state_from_peers()
    assert newcomer.local_epoch == newcomer.tracker.global_epoch == 40
    assert newcomer.state_averager.state_tensors()[0].tolist() == [40.0] * 5
    assert not newcomer.state_averager.stale


@pytest.mark.parametrize("others", [40, 0])
def test_a_newcomer_for_whom_no_donor_confirms_where_the_others_are_leaves(newcomer, others):
    said(newcomer.tracker, record(others), record(LAST))
    newcomer.answers = repeat(None)
    with pytest.raises(OutOfSync):
        newcomer.load_state_from_peers()


def test_a_claim_at_the_beginning_of_a_run_is_left_out_once_its_donor_says_that_it_is_one(newcomer):
    said(newcomer.tracker, record(0), record(LAST))
    newcomer.answers = repeat(0)
    newcomer.load_state_from_peers()
    assert newcomer.local_epoch == newcomer.tracker.global_epoch == 0
    assert not newcomer.tracker.relies_on_lone_claim


@pytest.fixture
def donor(newcomer, dht):
    """A donor at step 0, without threads and processes."""
    newcomer.tracker = DonorTracker(dht, "test", TARGET, client_mode=False, last_epoch=LAST, start=False)
    newcomer.is_donor, newcomer.was_solo = True, False
    newcomer.away_s, newcomer.noticed = 0.0, set()
    return newcomer


@pytest.mark.parametrize("claims", [[40, 40], [LAST] * 9])
def test_a_donor_takes_no_state_for_what_others_claim(donor, claims):
    said(donor.tracker, *map(record, claims))
    assert not donor._should_load_state_from_peers()
    assert donor.local_epoch == 0


def test_a_donor_takes_no_step_without_a_group_however_many_claim_one(donor):
    said(donor.tracker, *map(record, [LAST] * 9))
    with pytest.raises(NoGroup):
        donor._load_local_gradients_into_optimizer()
    assert donor.local_epoch == 0
    assert not donor.state_averager.stale


def test_a_donor_that_was_away_fetches_the_state_of_the_step_that_it_reported_before(donor):
    donor.tracker.donors = {owner_peer(donor.tracker._local_public_key)}
    said(donor.tracker, record(40), own=record(40))
    assert donor._should_load_state_from_peers()
    donor.answers = repeat(None)
    donor.load_state_from_peers()
    assert donor.local_epoch == 40
    assert donor.state_averager.stale


def missed(donor, step, monkeypatch, claims=(1,)):
    """Has a donor at this step find no group for the next one; trainers claim to be this many steps ahead of it."""

    def find_no_group(*_):
        raise NoGroup

    monkeypatch.setattr(hivemind.Optimizer, "_update_global_epoch", find_no_group)
    donor.auxiliary, donor.scheduled_state = False, None
    donor.grad_averager = SimpleNamespace(local_samples_accumulated=0)
    monkeypatch.setattr(donor.state_averager, "step", lambda **_: None)
    donor.state_averager.local_epoch = donor.state_averager.weights_epoch = step
    donor.tracker.local_progress = donor.tracker._get_local_progress(step, 0)
    donor.state_averager.state_tensors()[0].fill_(step)
    said(donor.tracker, *(record(step + ahead) for ahead in claims), own=record(step, samples_per_second=0.0))
    donor._update_global_epoch(None)


def test_a_donor_that_missed_the_last_step_takes_its_state_from_a_trainer(donor, monkeypatch):
    donor.answers = repeat(LAST)
    missed(donor, LAST - 1, monkeypatch)
    assert donor.local_epoch == donor.tracker.global_epoch == donor.state_averager.state_epoch == LAST
    assert donor.state_averager.state_tensors()[0].tolist() == [LAST] * 5


@pytest.mark.parametrize(("claims", "steps"), [((0, 1), 0), ((0, 0, 1), 0), ((0, 1, 1), 1)])
def test_a_donor_asks_for_the_last_state_only_if_most_trainers_have_it(donor, monkeypatch, claims, steps):
    donor.answers = repeat(LAST) if steps else iter(())  # asks nobody
    missed(donor, LAST - 1, monkeypatch, claims)
    assert donor.local_epoch == LAST - 1 + steps


def test_a_donor_refuses_a_last_state_that_one_step_cannot_reach(donor, monkeypatch):
    asked, judged = [], []
    donor.state_averager.validate = judged.append

    def download(peer, timeout, min_epoch):
        asked.append(timeout)
        state = [torch.full((5,), 1.2 * LAST)]
        return {"epoch": LAST, "sha256": tensors_sha256(state)}, state

    monkeypatch.setattr(donor.state_averager, "download", download)
    missed(donor, LAST - 1, monkeypatch)
    assert donor.local_epoch == LAST - 1
    assert donor.state_averager.state_tensors()[0].tolist() == [LAST - 1] * 5
    assert not judged
    assert asked == [10.0, 5.0, 5.0]  # the run's other donor, then those who claim to have the state


@pytest.mark.parametrize("why", ["it has a worse loss", "it is of another step"])
def test_a_donor_refuses_a_bad_state_of_the_last_step_too(donor, why, monkeypatch):
    def refuse(_):
        raise StateRefused(why)

    if why == "it has a worse loss":
        donor.state_averager.validate = refuse
    donor.answers = repeat(LAST if why == "it has a worse loss" else LAST - 1)
    missed(donor, LAST - 1, monkeypatch)
    assert donor.local_epoch == LAST - 1


def test_a_donor_that_missed_another_step_waits_for_the_next_group(donor, monkeypatch):
    donor.answers = iter(())  # asks nobody
    missed(donor, LAST - 2, monkeypatch)
    assert donor.local_epoch == LAST - 2


def test_a_donor_that_was_away_for_the_last_steps_takes_their_state_from_a_trainer(donor, monkeypatch):
    donor.away_s, donor.answers = 30.0, repeat(LAST)
    donor.scheduled_grads = control = MPFuture()
    missed(donor, LAST - 7, monkeypatch, claims=(7,))
    assert donor.local_epoch == donor.tracker.global_epoch == donor.state_averager.state_epoch == LAST
    assert donor.state_averager.state_tensors()[0].tolist() == [LAST] * 5
    assert control.cancelled()


@pytest.mark.parametrize("claims", [(0, 7), (6, 7), (0, 0, 7)])
def test_a_donor_that_was_away_asks_for_the_last_state_only_if_most_trainers_have_it(donor, monkeypatch, claims):
    donor.away_s, donor.answers = 30.0, iter(())  # asks nobody
    missed(donor, LAST - 7, monkeypatch, claims)
    assert donor.local_epoch == LAST - 7


@pytest.mark.parametrize("away_s", [0.0, 6.9])
def test_a_donor_is_not_taken_past_more_steps_than_it_was_away_for_and_says_what_to_do(donor, monkeypatch, away_s):
    notices = []
    donor.on_notice, donor.away_s, donor.answers = notices.append, away_s, iter(())  # asks nobody
    for _ in range(2):
        missed(donor, LAST - 7, monkeypatch, claims=(7, 7, 7))
    assert donor.local_epoch == LAST - 7
    [notice] = notices
    assert f"at step {LAST - 7}, and most trainers are at the last one, {LAST}" in notice
    assert "miss 7 steps: `dalle-lean join` takes the missing steps again" in notice


@pytest.mark.parametrize(("missed_steps", "norms", "taken"), [(3, 0.29, 1), (3, 0.31, 0), (300, 0.51, 0)])
def test_the_last_state_may_be_as_far_away_as_the_missed_steps_can_reach(
    donor, monkeypatch, missed_steps, norms, taken
):
    step, notices = LAST - missed_steps, []

    def download(peer, timeout, min_epoch):
        state = [torch.full((5,), (1 + norms) * step)]
        return {"epoch": LAST, "sha256": tensors_sha256(state)}, state

    monkeypatch.setattr(donor.state_averager, "download", download)
    donor.on_notice, donor.away_s = notices.append, 1000.0
    missed(donor, step, monkeypatch, claims=(missed_steps,))
    assert donor.local_epoch == (LAST if taken else step)
    assert taken or "differs from the current weights" in notices[-1]


@pytest.mark.parametrize(("ahead", "caught_up"), [(0, True), (1, True), (2, False)])
def test_a_donor_counts_as_away_until_it_takes_a_step_with_the_trainers(donor, monkeypatch, ahead, caught_up):
    group = SimpleNamespace(result=lambda: {STRANGERS[0]: ahead})
    monkeypatch.setattr(hivemind.Optimizer, "_average_gradients_and_load_into_optimizer", lambda *_: None)
    monkeypatch.setattr(stepping, "has_succeeded", lambda _: True)
    donor.groups, donor.dht, donor.away_s = [], donor.state_averager.dht, 30.0
    said(donor.tracker, record(ahead), own=record(0, samples_per_second=0.0))
    donor._average_gradients_and_load_into_optimizer(group)
    assert donor.away_s == (0.0 if caught_up else 30.0)


@pytest.mark.parametrize(("donors_at", "steps"), [(LAST, 0), (LAST - 1, 1)])
def test_a_helper_looks_for_no_group_after_the_last_step(newcomer, monkeypatch, donors_at, steps):
    dht, taken = newcomer.state_averager.dht, []
    tracker = HelperTracker(dht, "test", TARGET, client_mode=False, last_epoch=LAST, start=False)
    monkeypatch.setattr(hivemind.Optimizer, "step", lambda *_, **__: taken.append("step"))
    monkeypatch.setattr(newcomer, "check_processes", lambda: None)
    newcomer.tracker, newcomer.auxiliary, newcomer.was_solo = tracker, True, False
    newcomer.opt.failure = None
    tracker.believed_epoch, newcomer.state_averager.local_epoch = donors_at, LAST
    newcomer.step()
    assert len(taken) == steps


def test_the_runs_donors_are_asked_first_whatever_is_said_of_them(averager):
    def announce(peer, epoch):
        averager.dht.store("test.all_averagers", epoch, get_dht_time() + 60, subkey=peer.to_bytes())

    assert averager.known_donors() == [DONOR]
    announce(STRANGERS[0], float(LAST))
    announce(DONOR, None)
    assert averager.announced_donors() == {STRANGERS[0]: LAST}
    assert averager.known_donors() == [DONOR, STRANGERS[0]]


def test_no_announced_step_puts_a_peer_before_those_at_the_last_one(averager, monkeypatch):
    monkeypatch.setattr(averager, "announced_donors", lambda: dict(zip(STRANGERS, (LAST, 1e9), strict=True)))
    assert {averager.known_donors()[1] for _ in range(100)} == set(STRANGERS)


def test_strangers_who_keep_a_peer_waiting_do_so_once(averager, monkeypatch):
    asked = []

    def download(donor, timeout, min_epoch=0):
        asked.append((donor == DONOR, timeout))
        time.sleep(timeout)
        raise StateRefused("took too long")

    monkeypatch.setattr(averager, "download", download)
    monkeypatch.setattr(averager, "announced_donors", lambda: dict.fromkeys(STRANGERS, 1.0))
    with pytest.raises(StateRefused, match="took too long"):
        averager.load_state_from_peers(timeout=0.1)
    assert asked == [(True, 0.1), (False, 0.1)]


def handed_out(epoch, key=None):
    """A state, signed if a key is given."""
    state = [torch.full((5,), float(epoch))]
    metadata = {"epoch": epoch, "sha256": tensors_sha256(state)}
    return (sign_state(metadata, "test", key) if key else metadata), state


@pytest.fixture
def key(averager):
    """The key of the run's only donor."""
    key = RSAPrivateKey()
    averager.host = HostPeers(donors=frozenset({owner_peer(RSASignatureValidator(key).local_public_key)}))
    return key


def test_a_state_that_a_donor_signed_is_taken_from_anybody(averager, key, monkeypatch):
    monkeypatch.setattr(averager, "download", lambda *_: handed_out(40, key))
    assert averager.load_state_from_peers(min_epoch=0, max_epoch=30)
    assert averager.local_epoch == 40


@pytest.mark.parametrize("forged", ["no signature", "a stranger's", "of another step", "of another state"])
def test_a_state_without_a_donors_signature_is_judged_or_refused(averager, key, monkeypatch, forged):
    metadata, state = handed_out(40, {"no signature": None, "a stranger's": RSAPrivateKey()}.get(forged, key))
    changed = {"of another step": {"epoch": 41}, "of another state": {"sha256": tensors_sha256([torch.ones(5)])}}
    metadata |= changed.get(forged, {})
    state = [torch.ones(5)] if forged == "of another state" else state
    monkeypatch.setattr(averager, "download", lambda *_: (metadata, state))
    with pytest.raises(StateRefused, match="no donor signed it"):
        averager.load_state_from_peers(min_epoch=0)
    judged = []
    averager.validate = judged.append
    with pytest.raises(StateRefused, match="which no donor has reached"):
        averager.load_state_from_peers(min_epoch=0, max_epoch=39)
    assert not judged
    assert not averager.load_state_from_peers(min_epoch=0, max_epoch=41)
    assert len(judged) == 1


def test_the_weights_that_a_run_began_with_are_taken_from_a_donor_alone(averager, key, monkeypatch):
    averager.first_epoch, averager.validate = 2, lambda _: None
    for epoch, reason in ((1, "step 1"), (2, "the run's first step, and no donor signed it")):
        monkeypatch.setattr(averager, "download", lambda *_, epoch=epoch: handed_out(epoch))
        with pytest.raises(StateRefused, match=reason):
            averager.load_state_from_peers(min_epoch=0)
    asked = []
    monkeypatch.setattr(averager, "download", lambda *arguments: (asked.append(arguments[2]), handed_out(2, key))[1])
    assert averager.load_state_from_peers(min_epoch=0)
    assert (averager.local_epoch, asked) == (2, [2])


def test_a_donor_signs_what_it_hands_out(averager, monkeypatch):
    averager.host = HostPeers(donors=frozenset({averager.peer_id}))
    metadata, _, _ = averager.get_current_state()
    assert state_signer(metadata, "test") == averager.peer_id
    assert state_signer(metadata, "another run") is None


def test_a_peer_whose_averager_has_crashed_takes_no_further_step(newcomer, dht):
    newcomer.dht = dht
    crashed = newcomer.state_averager = Process(target=lambda: os.kill(os.getpid(), signal.SIGKILL))
    crashed.start()
    crashed.join()
    with pytest.raises(ProcessEnded, match="ended with code -9"):
        newcomer.step(batch_size=0)


def test_a_round_that_the_end_of_the_run_has_cancelled_does_not_spoil_leaving(newcomer):
    control = StepControl(0.0, deadline=1.0, allow_retries=False, weight=1.0, data_for_gather=b"")
    control.attach(trigger=MPFuture(), cancel=MPFuture())
    control.stage = AveragingStage.LOOKING_FOR_GROUP  # until its averager's process learns of it
    newcomer.scheduled_grads, newcomer.scheduled_state = control, None
    newcomer.state_averager = SimpleNamespace(latest_round=None, step=lambda **_: None, shutdown=lambda: None)
    newcomer.tracker.shutdown = lambda *_: None
    newcomer.status_loglevel, newcomer.shutdown_timeout, newcomer.grad_averager = 0, 1.0, None
    newcomer.stop_matchmaking()
    newcomer.shutdown()


def test_who_is_left_alone_says_so_once_and_counts_its_steps(newcomer):
    notices = []
    newcomer.on_notice = notices.append
    newcomer.solo_steps, newcomer.had_company = 0, True
    said(newcomer.tracker, record(0))
    said(newcomer.tracker)
    for _ in range(3):
        newcomer._load_local_gradients_into_optimizer()
    assert newcomer.solo_steps == 3
    assert notices == ["no other peers are left: training alone until they return"]


def test_who_trains_alone_from_the_start_has_no_solo_steps(newcomer):
    newcomer.solo_steps, newcomer.had_company = 0, False
    said(newcomer.tracker)
    newcomer._load_local_gradients_into_optimizer()
    assert newcomer.solo_steps == 0
