"""A tiny model's generator, a service around it, and the page served with it."""

import copy
import io
import os
import socket
from contextlib import closing, contextmanager
from threading import Event
from types import SimpleNamespace

import pytest

from dalle_lean.vocabulary import LIKELY, Vocabulary
from demo.actions import Actions
from demo.server import free_port, serve
from demo.service.drawing_service import DrawingService
from demo.service.latency_model import LatencyModel
from demo.service.scheduler import Scheduler
from inference import Generator
from tests.inference.tiny_model import CAPTIONS, save_tiny_model


@pytest.fixture(scope="session", autouse=True)
def downloads(tmp_path_factory):
    """gradio_client leaves a folder behind for each file that it fetches: here, not in /tmp."""
    folder = str(tmp_path_factory.mktemp("downloads"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradio_client.client.tempfile", SimpleNamespace(gettempdir=lambda: folder))
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def generator(model_folder):
    return Generator.from_folder(model_folder, device="cpu", precision="fp32")


@pytest.fixture(scope="session")
def knowing(generator):
    """The generator, which says which words it has learnt."""
    generator = copy.copy(generator)
    generator.vocabulary = Vocabulary.count([*CAPTIONS, "a smiling face"] * LIKELY)
    return generator


@pytest.fixture
def latency():
    """A machine on which a row of 8 pictures takes 1 s, one of 64 takes 2 s, and decoding a picture 0.1 s."""
    return LatencyModel(4, {8: 1.0, 64: 2.0}, picture_s=0.1)


@pytest.fixture
def service(generator, latency):
    return DrawingService(generator, latency, scheduler=Scheduler(2, 1))


@pytest.fixture
def knowing_service(knowing, latency):
    return DrawingService(knowing, latency, scheduler=Scheduler(2, 1))


def named_actions(service, examples=()):
    """The page's actions, whose updates go by the names of its parts."""
    names = "prompt stop status unknown stage gallery actions download more new_seed estimate"
    parts = SimpleNamespace(**{name: name for name in names.split()})
    parts.inputs = {name: name for name in ("num_images", "best", "top_k", "top_p", "seed")}
    return Actions(service, parts, examples)


TAB = SimpleNamespace(session_hash="tab")
WISH = {"num_images": 6, "best": 2, "top_k": 0, "top_p": 1.0, "seed": 1}


def answer(service, prompt="a red heart", values=WISH, stop=None, examples=()):
    """The updates of the page, and under "drawn" what More like this would be like."""
    actions = named_actions(service, examples)
    with closing(actions.answer(TAB, lambda: actions.read(prompt, values), stop or Event())) as updates:
        for update in updates:
            shown = actions.shown.get(TAB)
            yield update | ({"drawn": shown.drawn} if shown else {})


def failing_service(generator, latency, error):
    """A service whose scorer raises `error`."""

    def score(pixels, prompt):
        raise error

    scorer = SimpleNamespace(name="broken", score=score)
    return DrawingService(Generator(generator.model, generator.tokenizer, generator.vqgan, scorer), latency)


def encoded(image, kind="PNG"):
    """A picture as a file."""
    file = io.BytesIO()
    image.save(file, format=kind)
    return file.getvalue()


def own_port(first):
    """A free port from `first` on that no other pytest worker looks for."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    return free_port("127.0.0.1", first + 200 * worker, tries=100)


@contextmanager
def served(service, **options):
    """The page's address while it is up."""
    page = serve(service, port=own_port(17860), **options)
    try:
        yield page.local_url
    finally:
        page.close(verbose=False)


@pytest.fixture(scope="session")
def page_url(generator):
    with served(DrawingService(generator), card="# A tiny model\n\nwith random weights.") as url:
        yield url


@pytest.fixture(scope="session")
def knowing_url(knowing):
    with served(DrawingService(knowing)) as url:
        yield url


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]
