import threading
import time

import pytest

from tests.preprocessing.processes import wait_for
from training.data.prefetch import prefetch


@pytest.fixture
def started():
    """The threads that run now and did not before the test."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


def test_the_items_come_in_their_order_and_end(started):
    assert list(prefetch(iter(range(100)), 3)) == list(range(100))
    assert not started()


def test_no_more_is_made_ahead_than_asked_for():
    made = []

    def items():
        for number in range(20):
            made.append(number)
            yield number

    ahead = prefetch(items(), 3)
    assert next(ahead) == 0
    wait_for(lambda: len(made) == 5)  # one given, four waiting
    time.sleep(0.05)
    assert len(made) == 5
    assert list(ahead) == list(range(1, 20))


def test_what_is_raised_in_the_thread_is_raised_to_the_reader_after_what_came_before(started):
    def items():
        yield 1
        raise OSError("the disk is gone")

    ahead = prefetch(items(), 3)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert not started()


def test_closing_ends_the_thread_and_what_it_iterates(started):
    closed = threading.Event()

    def items():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    ahead = prefetch(items(), 2)
    next(ahead)
    ahead.close()
    assert closed.is_set()
    assert not started()


@pytest.fixture
def in_haste(monkeypatch):
    for name in ("POLL_S", "NOTICE_S"):
        monkeypatch.setattr(f"training.data.prefetch.{name}", 0.02)


def test_a_wait_is_told_again_and_again(in_haste):
    told = []
    go = threading.Event()

    def items():
        go.wait()
        yield 1

    def on_wait(seconds):
        told.append(seconds)
        if len(told) == 3:
            go.set()

    assert list(prefetch(items(), 1, on_wait)) == [1]
    assert told[:3] == sorted(told[:3])
    assert told[0] >= 0.02


def test_waiting_can_be_ended_while_the_thread_hangs(in_haste):
    go, asked = threading.Event(), []

    def items():
        yield 1
        go.wait()

    def stop_waiting():
        asked.append(len(asked))
        go.set()
        return True

    assert list(prefetch(items(), 1, stop_waiting=stop_waiting)) == [1]
    assert asked == [0]
