"""Who is served, who waits, whose turn it is."""

import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial

import pytest

from demo.service.scheduler import Busy, Scheduler, forecast


def test_the_first_few_are_served_and_the_others_wait_in_their_order():
    scheduler = Scheduler(at_once=2, waiting=3)
    with ExitStack() as stack:
        tickets = [stack.enter_context(scheduler.ticket()) for _ in range(5)]
        assert [ticket.line for ticket in tickets] == [0, 0, 1, 2, 3]
        assert [ticket.wait(0) for ticket in tickets] == [True, True, False, False, False]


def test_who_leaves_lets_the_next_one_in():
    scheduler = Scheduler(at_once=1, waiting=2)
    with ExitStack() as stack:
        with scheduler.ticket():
            second, third = (stack.enter_context(scheduler.ticket()) for _ in range(2))
            assert not second.wait(0)
        assert second.wait(0)
        assert third.line == 1


def test_a_failure_frees_the_place():
    scheduler = Scheduler(at_once=1, waiting=0)
    with pytest.raises(RuntimeError), scheduler.ticket():
        raise RuntimeError
    with scheduler.ticket() as ticket:
        assert ticket.wait(0)


def test_a_full_line_says_when_there_will_be_room():
    scheduler = Scheduler(at_once=2, waiting=1)
    with ExitStack() as stack:
        for left_s in (10.0, 4.0, 7.0):
            stack.enter_context(scheduler.ticket(left_s))
        with pytest.raises(Busy) as busy, scheduler.ticket():
            pass
        assert (busy.value.served, busy.value.waiting) == (2, 1)
        assert busy.value.seconds == 8.0  # the shorter of two that share the machine
    assert len(scheduler) == 0


def test_turns_are_taken_one_after_another_on_one_thread():
    scheduler, threads, inside = Scheduler(), set(), []

    def job():
        inside.append(1)
        assert len(inside) == 1
        threads.add(threading.get_ident())
        time.sleep(0.001)
        inside.pop()

    def work():
        for _ in range(20):
            scheduler.run(job)

    people = [threading.Thread(target=work) for _ in range(4)]
    for person in people:
        person.start()
    for person in people:
        person.join(30)
    assert len(threads) == 1
    assert inside == []


def test_a_turn_gives_back_what_the_job_returns_or_raises():
    scheduler = Scheduler()
    assert scheduler.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        scheduler.run(lambda: 1 / 0)
    assert scheduler.run(lambda: 4) == 4


def test_turns_alternate_so_that_a_short_job_does_not_wait_for_a_long_one():
    scheduler, log, asked, done = Scheduler(), [], Counter(), set()

    def turn(name, other):
        log.append(name)
        while other not in done and asked[other] <= log.count(other):
            time.sleep(0.001)  # a busy machine may be slow to let the other ask for its next turn
        time.sleep(0.02)

    def work(name, other, steps):
        for _ in range(steps):
            asked[name] += 1
            scheduler.run(partial(turn, name, other))
        done.add(name)

    jobs = ("long", "short", 12), ("short", "long", 5)
    long, short = (threading.Thread(target=work, args=job) for job in jobs)
    long.start()
    short.start()
    short.join(30)
    long.join(30)
    first = log.index("short")
    assert log[first : first + 9 : 2] == ["short"] * 5
    assert log[first + 1 : first + 8 : 2] == ["long"] * 4


def test_waiting_ends_as_soon_as_there_is_room():
    scheduler = Scheduler(at_once=1, waiting=1)
    with ExitStack() as first:
        first.enter_context(scheduler.ticket())
        with scheduler.ticket() as second:
            threading.Timer(0.05, first.pop_all().close).start()
            assert second.wait(10)


@pytest.mark.parametrize(
    ("left_s", "at_once", "expected"),
    [
        ([], 2, []),
        ([3.0], 2, [(0, 3)]),
        ([2.0, 2.0], 2, [(0, 4), (0, 4)]),
        ([1.0, 3.0], 2, [(0, 2), (0, 4)]),
        ([1.0, 3.0, 5.0], 1, [(0, 1), (1, 4), (4, 9)]),
        ([1.0, 3.0, 1.0], 2, [(0, 2), (0, 5), (2, 4)]),
    ],
)
def test_the_forecast_shares_the_machine_evenly(left_s, at_once, expected):
    assert forecast(left_s, at_once) == expected


def test_the_forecast_is_what_happens_when_the_machine_is_simulated():
    left_s, at_once, step = [0.7, 2.0, 0.4, 1.1, 0.3], 3, 0.001
    left, now, ends = dict(enumerate(left_s)), 0.0, {}
    while left:
        for job in list(left)[:at_once]:
            now += step
            left[job] -= step
            if left[job] <= 0:
                ends[job] = now
                del left[job]
    for job, (_, end) in enumerate(forecast(left_s, at_once)):
        assert end == pytest.approx(ends[job], abs=0.02)
