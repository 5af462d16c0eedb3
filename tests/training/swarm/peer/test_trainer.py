"""How a trainer begins, and how it ends a run that is complete."""

from types import SimpleNamespace

import pytest

from dalle_lean.ending import Terminated
from training.swarm.config import SwarmSection, TimingSection
from training.swarm.optimizer.swarm_optimizer import ProcessEnded
from training.swarm.peer import trainer as module
from training.swarm.peer.trainer import Peer

LAST = 10
TIMING = TimingSection(averaging_timeout_s=20.0, load_state_timeout_s=30.0)


@pytest.fixture
def peer(monkeypatch):
    """A trainer after the last step, whose donor is a step behind; `waits` are its pauses, on a clock of its own."""
    peer = Peer.__new__(Peer)
    peer.notices, peer.waits = [], []
    peer.settings = SimpleNamespace(timing=TIMING, first_epoch=0, last_epoch=LAST, swarm=SwarmSection(donors=("Qm",)))
    peer.optimizer = SimpleNamespace(local_epoch=LAST, tracker=SimpleNamespace(donor_epoch=LAST - 1))
    peer.watch, peer.dht = SimpleNamespace(moved=None, over=False), SimpleNamespace(client_mode=False)
    peer.on_notice = peer.notices.append
    monkeypatch.setattr(peer, "pause", lambda: peer.waits.append(5.0))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: sum(peer.waits)))
    return peer


def test_it_stays_as_long_as_a_donor_may_look_for_a_group_and_download(peer):
    peer.wait_for_donors()
    assert sum(peer.waits) == 2 * 20 + 30
    assert peer.notices == ["the last step is done; staying until the host has it, 70 s at most"]


def test_it_leaves_once_the_donor_has_the_step(peer):
    def pause():
        peer.waits.append(5.0)
        peer.optimizer.tracker.donor_epoch = LAST

    peer.pause = pause
    peer.wait_for_donors()
    assert len(peer.waits) == 1


def test_it_leaves_once_the_dht_says_that_the_run_is_over(peer):
    def pause():
        peer.waits.append(5.0)
        peer.watch.over = True

    peer.pause = pause
    peer.wait_for_donors()
    assert len(peer.waits) == 1


@pytest.mark.parametrize(
    ("donor", "others", "over", "waits"),
    [(None, 0, False, 3), (None, 1, False, 0), (0, 0, False, 0), (LAST, 0, False, 0), (None, 0, True, 0)],
)
def test_it_does_not_begin_a_run_anew_while_it_sees_neither_a_donor_nor_later_steps(peer, donor, others, over, waits):
    def pause():
        peer.waits.append(5.0)
        tracker.donor_epoch = 0 if len(peer.waits) == 3 else None

    peer.pause, tracker = pause, peer.optimizer.tracker
    peer.optimizer.local_epoch, peer.watch.over = 0, over
    tracker.donor_epoch, tracker.global_epoch = donor, others
    peer.wait_for_host()
    assert len(peer.waits) == waits
    assert len(peer.notices) == (waits > 0)


@pytest.mark.parametrize("what", [KeyboardInterrupt, Terminated, ProcessEnded])
def test_what_ends_the_wait_does_not_spoil_a_run_that_is_complete(peer, what):
    def pause():
        peer.waits.append(5.0)
        raise what

    peer.pause = pause
    peer.wait_for_donors()
    assert len(peer.waits) == 1


def test_a_client_leaves_at_once(peer):
    peer.dht.client_mode = True
    peer.wait_for_donors()
    assert peer.waits == peer.notices == []
