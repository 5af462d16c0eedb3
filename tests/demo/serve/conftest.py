"""An engine of two replicas on loopback, and how to find and kill them."""

import os
import signal
from contextlib import contextmanager

import pytest

pytest.importorskip("ray.serve", reason="pip install 'dalle-lean[serve]'")

from benchmarks.serving import SLOW
from demo.serve.client import RemoteService
from demo.serve.cluster import EngineSettings, engine_running
from demo.server import free_port
from tests.inference.tiny_model import save_tiny_model


@contextmanager
def running(folder, **settings):
    """The engine, and its address."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    port = free_port("127.0.0.1", 28000 + 200 * worker, tries=100)
    metrics_port = free_port("127.0.0.1", 28100 + 200 * worker, tries=100)
    given = EngineSettings(port=port, metrics_port=metrics_port, device="cpu", batch_size=16, **settings)
    with engine_running(folder, given) as engine:
        yield engine, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def engine(folder):
    with running(folder, replicas=2, waiting=3, scorer=SLOW) as (engine, address):
        engine.address = address
        yield engine


@pytest.fixture
def service(engine):
    return RemoteService(engine.address)


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
