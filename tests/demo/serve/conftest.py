"""An engine of two replicas on loopback."""

import pytest

pytest.importorskip("ray.serve", reason="pip install 'dalle-lean[serve]'")

from benchmarks.serving import SLOW
from dalle_lean.io.model_folder import check_parts
from demo.serve.client import RemoteService
from demo.serve.cluster import EngineSettings, engine_running
from demo.serve.drawer import FILES
from demo.serve.wire import latency_to_json
from tests.demo.conftest import own_port
from tests.inference.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def engine(folder):
    ports = {"port": own_port(28000), "metrics_port": own_port(28100)}
    settings = EngineSettings(replicas=2, waiting=3, device="cpu", scorer=SLOW, batch_size=16, **ports)
    with engine_running(folder, settings) as engine:
        engine.address = f"http://127.0.0.1:{settings.port}"
        yield engine


@pytest.fixture
def service(engine):
    return RemoteService(engine.address)


@pytest.fixture
def description(generator, model_folder, latency):
    """What an engine says of its model."""
    return {
        "files": {name: (model_folder / name).read_text() for name in FILES if (model_folder / name).is_file()},
        "content": check_parts(model_folder),
        "downscale": generator.vqgan.config.downscale,
        "scorer": "CLIP",
        "device": "cpu",
        "precision": "fp32",
        "latency": latency_to_json(latency),
    }
