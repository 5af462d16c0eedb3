"""Twenty people at once."""

from dataclasses import replace

import pytest

from benchmarks.page_load import make_requests, run_users
from demo.service.drawing_service import DrawingService
from tests.demo.conftest import served

PEOPLE = 20


@pytest.mark.slow
def test_of_twenty_people_none_is_lost_and_none_is_mixed_up(generator):
    service = DrawingService(generator)
    requests = [make_requests(generator, person, num_images=8) for person in range(PEOPLE)]
    with served(service) as url:
        result = run_users(url, requests, seconds=20.0)
    assert result.lost == []
    assert result.mixed_up == 0
    assert result.busy == 0
    assert len(result.latencies_s) >= PEOPLE
    assert len(service.scheduler) == 0


def test_a_wrong_answer_would_be_noticed(generator):
    requests = make_requests(generator, 0, num_images=8)
    with served(DrawingService(generator)) as url:
        right = run_users(url, [requests], seconds=0.5)
        wrong = run_users(url, [[replace(request, seed=7) for request in requests]], seconds=1)
    assert right.mixed_up == 0
    assert wrong.mixed_up == len(wrong.latencies_s) > 0
