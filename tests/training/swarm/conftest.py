"""A nursery for all tests, and a swarm that tests share while they kill its members."""

import pytest

from tests.training.swarm.harness import Nursery, Swarm
from training.swarm.network.dht import open_dht


@pytest.fixture(scope="session")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def dht():
    """A DHT node without others."""
    node = open_dht([], client_mode=False, listen=["/ip4/127.0.0.1/tcp/0"])
    yield node
    node.shutdown()


@pytest.fixture(scope="module")
def module_swarm(tmp_path_factory, nursery):
    with Swarm(tmp_path_factory.mktemp("swarm"), batch_size=128, nursery=nursery) as swarm:
        swarm.start_usual()
        yield swarm


@pytest.fixture
def standing(module_swarm, request):
    """Two helpers, a donor and two trainers after two common steps; prints their output if a test fails."""
    failed = request.session.testsfailed
    yield module_swarm
    if request.session.testsfailed > failed:
        print(module_swarm.report())
