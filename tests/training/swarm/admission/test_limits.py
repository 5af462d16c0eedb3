"""Calls and streams of each peer are limited, and the memory for that is bounded."""

from contextlib import ExitStack

import pytest

from training.swarm.admission import limits
from training.swarm.admission.limits import Buckets, Limits
from training.swarm.admission.passes import Refused


class Clock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    return clock


def allowed(buckets, calls):
    """How many of so many calls in a row are let through."""
    for number in range(calls):
        try:
            buckets.take("a")
        except Refused:
            return number
    return calls


def test_a_bucket_lets_a_burst_through_and_then_its_rate(clock):
    buckets = Buckets(rate_per_s=2, burst=5)
    assert allowed(buckets, 6) == 5
    clock.now_s = 1
    assert allowed(buckets, 3) == 2
    clock.now_s = 1000
    assert allowed(buckets, 100) == 5


def test_one_caller_does_not_use_up_what_another_may_do(clock):
    buckets = Buckets(1, 3)
    for _ in range(3):
        buckets.take("a")
    with pytest.raises(Refused):
        buckets.take("a")
    buckets.take("b")
    clock.now_s = 1
    buckets.take("a")


def test_strangers_share_what_they_may_do_and_take_nothing_from_members():
    permitted = Limits()
    admitted = 0
    for number in range(10_000):
        try:
            permitted.count_call(f"stranger {number}", known=False)
            admitted += 1
        except Refused:
            continue
    assert admitted == limits.NEWCOMER_CALLS_AT_ONCE
    permitted.count_call("member", known=True)


def test_ten_thousand_callers_do_not_grow_memory():
    buckets = Buckets(1, 3)
    for number in range(10_000):
        buckets.take(f"peer {number}")
    assert len(buckets.left) == limits.MAX_REMEMBERED


def test_a_peer_holds_a_limited_number_of_streams_open():
    permitted = Limits()
    with ExitStack() as held:
        for _ in range(limits.MAX_STREAMS):
            held.enter_context(permitted.stream("a"))
        with pytest.raises(Refused), permitted.stream("a"):
            pass
        with permitted.stream("b"):
            pass
    assert not permitted.streams
    with permitted.stream("a"):
        pass


def test_strangers_that_show_no_pass_keep_no_member_out():
    permitted = Limits()
    with ExitStack() as held:
        for _ in range(limits.MAX_HANDSHAKES):
            held.enter_context(permitted.handshake(known=False))
        with pytest.raises(Refused), permitted.handshake(known=False):
            pass
        with permitted.handshake(known=True):
            pass
    with permitted.handshake(known=False):
        pass
