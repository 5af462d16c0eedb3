import pytest

from preprocessing.encoding.work_queue import MAX_RUN, WorkersDie, WorkQueue, runs


def test_every_part_is_handed_out_once():
    queue = WorkQueue([3, 5, 8])
    assert [queue.next_part(worker) for worker in "abab"] == [3, 5, 8, None]


def test_what_a_dead_worker_left_undone_comes_first_and_in_order():
    queue = WorkQueue(range(6))
    assert [queue.next_part("a") for _ in range(3)] == [0, 1, 2]
    assert queue.next_part("b") == 3
    assert queue.worker_died("a", is_finished=lambda part: part == 0)
    assert [queue.next_part("b") for _ in range(4)] == [1, 2, 4, 5]


def test_a_worker_that_died_after_its_work_leaves_nothing_to_do():
    queue = WorkQueue([0])
    queue.next_part("a")
    assert not queue.worker_died("a", is_finished=lambda part: True)


def test_a_part_that_ends_three_workers_is_a_mistake_that_names_it():
    queue = WorkQueue([7, 8])
    for worker in "ab":
        queue.next_part(worker)
        queue.worker_died(worker, is_finished=lambda part: False)
    queue.next_part("c")
    with pytest.raises(WorkersDie, match="part 7"):
        queue.worker_died("c", is_finished=lambda part: False)


def test_workers_that_cannot_start_are_a_mistake():
    queue = WorkQueue([7])
    queue.worker_died("a", is_finished=lambda part: False)
    queue.worker_died("b", is_finished=lambda part: False)
    with pytest.raises(WorkersDie, match="as they start"):
        queue.worker_died("c", is_finished=lambda part: False)


@pytest.mark.parametrize(("count", "workers"), [(1, 1), (25, 2), (1000, 4), (3, 8)])
def test_runs_hold_every_part_once_and_the_last_is_one_part(count, workers):
    found = list(runs(range(count), workers))
    assert [part for run in found for part in run] == list(range(count))
    lengths = [len(run) for run in found]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] <= MAX_RUN
    assert lengths[-1] == 1
    assert all(sum(lengths[place:]) >= workers * length for place, length in enumerate(lengths) if length > 1)
