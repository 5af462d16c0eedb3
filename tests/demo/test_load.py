"""Twenty people at once."""

import pytest

from benchmarks.page_load import make_tasks, run_people
from demo.service.drawing_service import DrawingService
from tests.demo.conftest import served

PEOPLE = 20


@pytest.mark.slow
def test_of_twenty_people_none_is_lost_and_none_is_mixed_up(generator):
    service = DrawingService(generator)
    tasks = [make_tasks(generator, person, num_images=8) for person in range(PEOPLE)]
    with served(service) as url:
        tally = run_people(url, tasks, seconds=20.0)
    assert tally.lost == []
    assert tally.mixed_up == 0
    assert tally.busy == 0
    assert len(tally.latencies_s) >= PEOPLE
    assert len(service.scheduler) == 0


def test_a_wrong_answer_would_be_noticed(generator):
    tasks = make_tasks(generator, 0, num_images=8)
    with served(DrawingService(generator)) as url:
        right = run_people(url, [tasks], seconds=0.5)
        wrong = run_people(url, [[task.__class__(**{**vars(task), "seed": 7}) for task in tasks]], seconds=0.5)
    assert right.mixed_up == 0
    assert wrong.mixed_up == len(wrong.latencies_s) > 0
