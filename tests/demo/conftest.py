"""A tiny model's generator, and the page served with it."""

import socket

import pytest

from demo.server import serve
from inference import Generator
from tests.inference.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def generator(model_folder):
    return Generator.from_folder(model_folder, device="cpu")


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(scope="session")
def page_url(generator):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    page = serve(generator, port=port, card="# A tiny model\n\nwith random weights.")
    yield page.local_url
    page.close(verbose=False)
